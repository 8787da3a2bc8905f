"""Draws docs/unit.svg: events, decisions and actions of one unit in a training step.

    python docs/draw_unit.py           # needs matplotlib; every run writes the same bytes
    python docs/draw_unit.py out.png   # another format, to look at it

A schematic: time runs to the right, in steps of no particular length.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

SETTINGS = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "infinity"}
PAGE, INK, SOFT = "#ffffff", "#1f2933", "#66727f"
MODEL, DECISION, RESIDENCY, GRADIENTS, UPDATES = "#55606c", "#7048c6", "#2f6fde", "#d9480f", "#2b8a3e"

ROWS = (
    ("Model", "its hooks report", MODEL, "#f1f3f5"),
    ("Schedule", "pure: event in, decision out", DECISION, "#f3effb"),
    ("UnitStore", "buffers on the device", RESIDENCY, "#eaf1fd"),
    ("Gradients", "collect, reduce, store", GRADIENTS, "#fdeee6"),
    ("UpdatePipeline", "tiles of the shard", UPDATES, "#eaf5ec"),
)
TOP = {"Model": 4.85, "Schedule": 3.1, "UnitStore": 2.05, "Gradients": 1.05, "UpdatePipeline": 0.05}
"""Lower edge of each band."""
RUNNER = 4.5
"""Middle of the band of the runner, between the model and the schedule."""


@dataclass(frozen=True)
class Moment:
    """A column of the picture. event: the call of the schedule. row: the executor of the action."""

    code: str
    event: str
    decision: str
    row: str
    action: str


FETCH = "lease, read,\nall-gather"
MOMENTS = (
    Moment("forward enters\nthe block", "used", "Fetch, and the\nnext ones ahead", "UnitStore", FETCH),
    Moment(
        "forward enters\nlater blocks",
        "victims",
        "Evict the farthest\nnext use",
        "UnitStore",
        "give the buffer\nto another unit",
    ),
    Moment("backward unpacks\na saved reference", "used", "Fetch again", "UnitStore", FETCH),
    Moment("a gradient\narrives", "gradient", "Collect", "Gradients", "copy, clear\n.grad"),
    Moment("the last gradient\narrives", "gradient", "Reduce", "Gradients", "reduce-scatter,\nadd to the shard"),
    Moment(
        "backward goes on,\nor step() is called",
        "update",
        "Update now,\nor at step()",
        "UpdatePipeline",
        "read | Adam |\nwrite each tile",
    ),
    Moment("the next forward\nenters the block", "used", "Fetch after\nthe update", "UnitStore", FETCH),
)
WIDTH = 2.05


def draw(path: Path) -> None:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(13.4, 5.5), facecolor=PAGE)
        axes = figure.add_axes((0.135, 0.015, 0.86, 0.89))
        figure.text(0.012, 0.95, "One unit in a training step", fontsize=16, weight="bold", color=INK, va="center")
        note = "updates during backward, or in the next forward"
        figure.text(0.988, 0.95, note, fontsize=11, color=SOFT, va="center", ha="right")
        axes.set_xlim(0, WIDTH * len(MOMENTS))
        axes.set_ylim(0, 5.75)
        axes.axis("off")
        for name, about, colour, band in ROWS:
            _band(axes, TOP[name], 0.8, band)
            axes.text(-0.12, TOP[name] + 0.5, name, fontsize=12.5, weight="bold", color=colour, ha="right", va="center")
            axes.text(-0.12, TOP[name] + 0.24, about, fontsize=7.5, color=SOFT, ha="right", va="center")
        axes.text(-0.12, RUNNER + 0.1, "Runner", fontsize=12.5, weight="bold", color=INK, ha="right", va="center")
        axes.text(-0.12, RUNNER - 0.14, "events, questions, calls", fontsize=7.5, color=SOFT, ha="right", va="center")
        axes.add_patch(Rectangle((0, RUNNER - 0.22), WIDTH * len(MOMENTS), 0.46, facecolor="none", edgecolor=INK))
        for number, moment in enumerate(MOMENTS):
            _moment(axes, WIDTH * number + WIDTH / 2, moment)
        figure.savefig(path, facecolor=PAGE, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def _moment(axes: Axes, middle: float, moment: Moment) -> None:
    colour = next(colour for name, _, colour, _ in ROWS if name == moment.row)
    _box(axes, middle, TOP["Model"], moment.code, MODEL)
    _box(axes, middle - 0.17, TOP["Schedule"], moment.decision, DECISION, width=1.4)
    _box(axes, middle, TOP[moment.row], moment.action, colour)
    axes.text(middle - 0.47, RUNNER, moment.event, fontsize=9.5, style="italic", color=INK, ha="right", va="center")
    # A hook reports to the runner, which asks the schedule, gets a decision, and calls the executor.
    _arrow(axes, (middle - 0.37, TOP["Model"] + 0.02), (middle - 0.37, RUNNER + 0.24), MODEL)
    _arrow(axes, (middle - 0.37, RUNNER - 0.22), (middle - 0.37, TOP["Schedule"] + 0.72), INK)
    _arrow(axes, (middle + 0.05, TOP["Schedule"] + 0.72), (middle + 0.05, RUNNER - 0.22), DECISION)
    _arrow(axes, (middle + 0.76, RUNNER - 0.22), (middle + 0.76, TOP[moment.row] + 0.72), colour)


def _band(axes: Axes, low: float, height: float, colour: str) -> None:
    axes.add_patch(Rectangle((0, low), WIDTH * len(MOMENTS), height, facecolor=colour, edgecolor="none", zorder=0))


def _box(axes: Axes, middle: float, low: float, text: str, colour: str, width: float = 1.74) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (middle - width / 2, low + 0.13),
            width,
            0.54,
            boxstyle="round,pad=0.05,rounding_size=0.08",
            facecolor=colour,
            edgecolor="none",
            zorder=3,
        )
    )
    axes.text(middle, low + 0.4, text, fontsize=8.8, color="white", ha="center", va="center", zorder=4, linespacing=1.1)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.6, color=colour, shrinkA=0, shrinkB=0, zorder=2
        )
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("unit.svg"))
