"""Draws docs/flow.svg: one unit on its way through the tiers, and the lanes of a training step.

    python docs/draw_flow.py           # needs matplotlib; every run writes the same bytes
    python docs/draw_flow.py out.png   # another format, to look at it

A schematic, not a measurement: four units, parameters and optimizer states on NVMe, updates during backward.
Both halves share the axis of time, whose units are arbitrary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

SETTINGS = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "infinity"}
PAGE, INK, SOFT, RULE = "#ffffff", "#1f2933", "#66727f", "#d5dbe1"
OTHER, OTHER_INK = "#dfe4ea", "#55606c"
PARAMETERS, GRADIENT, STATES = "#2f6fde", "#d9480f", "#2b8a3e"
AT_REST = (("parameters", "new parameters", "#c9dcfa", 0.73), ("optimizer states", "new states", "#c6e6cd", 0.27))
"""States on NVMe: label before and after the step, colour, height within the band."""
END = 15.0
UNIT = 2

TIERS = (
    ("Device", "buffers of a few units", "#eaf1fd"),
    ("Host memory", "staging and update buffers", "#f0f4f0"),
    ("NVMe", "all states of the model", "#fdf4e3"),
)

Block = tuple[float, float, int, str, str]
"""Start, end, unit, label, and the colour used if the unit is the highlighted one."""

LANES: dict[str, list[Block]] = {
    "compute": [
        *((1 + n, 2 + n, n + 1, "fwd", PARAMETERS) for n in range(4)),
        *((11 - 2 * n, 13 - 2 * n, n + 1, "backward", PARAMETERS) for n in range(4)),
    ],
    "read": [
        *((n, n + 1, n + 1, "param", PARAMETERS) for n in range(4)),
        (6, 7, 4, "states", STATES),
        (7, 8, 2, "param", PARAMETERS),
        (8, 9, 3, "states", STATES),
        (9, 10, 1, "param", PARAMETERS),
        (10, 11, 2, "states", STATES),
        (12, 13, 1, "states", STATES),
    ],
    "update": [(7 + 2 * n, 8 + 2 * n, 4 - n, "Adam", STATES) for n in range(4)],
    "write": [(8 + 2 * n, 9 + 2 * n, 4 - n, "write", STATES) for n in range(4)],
}


def draw(path: Path) -> None:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(13, 6.6), facecolor=PAGE)
        tiers, lanes = figure.subplots(2, 1, height_ratios=(1.12, 1))
        figure.subplots_adjust(left=0.15, right=0.985, top=0.9, bottom=0.055, hspace=0.16)
        figure.text(
            0.012, 0.955, "One unit through a training step", fontsize=16, weight="bold", color=INK, va="center"
        )
        setting = "4 units, every state on NVMe, updates during backward"
        figure.text(0.985, 0.955, setting, fontsize=11, color=SOFT, va="center", ha="right")
        draw_tiers(tiers)
        draw_lanes(lanes)
        for axes in (tiers, lanes):
            axes.set_xlim(-0.05, END + 0.05)
            axes.axis("off")
        figure.savefig(path, facecolor=PAGE, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


# -- tiers -------------------------------------------------------------------------------------------------------------

HEIGHT, GAP = 1.0, 0.16


def floor(tier: int) -> float:
    """Return the lower edge of a tier's band. Tier 0 is the device, on top."""
    return (2 - tier) * (HEIGHT + GAP)


def draw_tiers(axes: Axes) -> None:
    axes.set_ylim(-0.06, 3 * HEIGHT + 2 * GAP + 0.06)
    note = {"fontsize": 9, "color": SOFT, "va": "center"}
    for number, (name, what, colour) in enumerate(TIERS):
        low = floor(number)
        axes.add_patch(Rectangle((0, low), END, HEIGHT, facecolor=colour, edgecolor="none"))
        axes.text(-0.18, low + 0.60, name, fontsize=13, weight="bold", color=INK, ha="right", va="center")
        axes.text(-0.18, low + 0.34, what, fontsize=8.5, color=SOFT, ha="right", va="center")
    prefetch(axes, 1)
    stay(axes, 0, 2, 3, "forward", PARAMETERS, 0.5)
    axes.text(3.15, floor(0) + 0.5, "unit 4 takes the buffer:\nunchanged, so nothing is written", **note)
    prefetch(axes, 7)
    stay(axes, 0, 8, 11, "ready, then backward", PARAMETERS, 0.5)
    stay(axes, 1, 11, 12, "Adam", STATES, 0.5)
    for old, new, colour, at in AT_REST:
        box(axes, 0.05, 12.95, floor(2) + at, 0.38, old, colour, INK, 10)
        box(axes, 13.05, END - 0.05, floor(2) + at, 0.38, new, colour, INK, 10)
    arrow(axes, (11, floor(0) + 0.31), (11.4, floor(1) + 0.72), GRADIENT)
    axes.text(11.42, floor(0) + 0.12, "gradient", fontsize=10, color=GRADIENT, va="center_baseline")
    arrow(axes, (10.15, floor(2) + 0.46), (11, floor(1) + 0.42), STATES)
    arrow(axes, (12, floor(1) + 0.42), (13.2, floor(2) + 0.94), STATES)


def prefetch(axes: Axes, start: float) -> None:
    """Draw the way of parameters from NVMe through host memory to the device, from start to start + 1."""
    arrow(axes, (start + 0.1, floor(2) + 0.92), (start + 0.36, floor(1) + 0.28), PARAMETERS)
    stay(axes, 1, start + 0.02, start + 0.98, "staging", PARAMETERS, 0.5)
    arrow(axes, (start + 0.64, floor(1) + 0.72), (start + 1.02, floor(0) + 0.5), PARAMETERS)


def stay(
    axes: Axes, tier: int, start: float, end: float, label: str, colour: str, at: float, height: float = 0.38
) -> None:
    box(axes, start + 0.05, end - 0.05, floor(tier) + at, height, label, colour, "white", 10)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=14, linewidth=2.2, color=colour, shrinkA=0, shrinkB=0, zorder=6
        )
    )


# -- lanes -------------------------------------------------------------------------------------------------------------


def draw_lanes(axes: Axes) -> None:
    axes.set_ylim(-0.62, 4.05)
    for number, (name, blocks) in enumerate(LANES.items()):
        middle = 3.5 - number
        axes.plot([0, END], [middle, middle], color=RULE, linewidth=1, zorder=0)
        axes.text(-0.18, middle, name, fontsize=13, weight="bold", color=INK, ha="right", va="center")
        for start, end, unit, label, colour in blocks:
            mine = unit == UNIT
            fill, ink = (colour, "white") if mine else (OTHER, OTHER_INK)
            box(axes, start + 0.04, end - 0.04, middle, 0.62, f"{label} {unit}", fill, ink, 9.5 if mine else 9)
    axes.annotate(
        "", xy=(END, -0.12), xytext=(0, -0.12), arrowprops={"arrowstyle": "-|>", "color": SOFT, "linewidth": 1.2}
    )
    axes.text(END, -0.4, "time", fontsize=10, color=SOFT, ha="right", va="center")
    legend = (
        (PARAMETERS, "parameters of unit 2"),
        (GRADIENT, "its gradient"),
        (STATES, "its optimizer states"),
        (OTHER, "other units"),
    )
    at = 0.05
    for colour, text in legend:
        axes.add_patch(Rectangle((at, -0.5), 0.22, 0.2, facecolor=colour, edgecolor="none"))
        axes.text(at + 0.32, -0.4, text, fontsize=10, color=SOFT, va="center")
        at += 0.75 + 0.122 * len(text)


def box(
    axes: Axes, left: float, right: float, middle: float, height: float, text: str, fill: str, ink: str, size: float
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left + 0.05, middle - height / 2 + 0.05),
            right - left - 0.1,
            height - 0.1,
            boxstyle="round,pad=0.05,rounding_size=0.08",
            facecolor=fill,
            edgecolor="none",
            zorder=3,
        )
    )
    axes.text(
        (left + right) / 2,
        middle,
        text,
        fontsize=size,
        color=ink,
        ha="center",
        va="center_baseline",
        zorder=7,
        linespacing=1.05,
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("flow.svg"))
