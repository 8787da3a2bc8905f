"""Draws a trace: a row of bars for each lane, and below them the bytes in each tier. Needs matplotlib."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from infinity.cli.console import GRID, INK, MUTED, printable
from infinity.cli.trace_file import Trace
from infinity.observe.intervals import Interval, seconds, union
from infinity.observe.timeline import LANES
from infinity.tier_kind import TierKind

_COLOURS = {
    "compute": "#2f6fde",
    "gather": "#7c5cd6",
    "reduce": "#b45cc9",
    "host_to_device": "#0f9d8a",
    "device_to_host": "#57b894",
    "nvme_read": "#e4572e",
    "nvme_write": "#f0a04b",
    "update": "#c2255c",
    "activations": "#8a6d3b",
}
_FORWARD = "#9dbdf3"
"""Colour of compute in forward."""
_OF_TIER = {"device": "#2f6fde", "host": "#0f9d8a", "nvme": "#e4572e"}
_FINEST = 1200
"""Bars nearer to each other than 1/`_FINEST` of the width are one."""


def draw(path: Path, trace: Trace, *, title: str) -> None:
    """Write a picture in the format of the suffix of `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot would look for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.4), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    rows: Any = figure.add_axes((0.115, 0.36, 0.745, 0.53))
    bytes_of_tiers: Any = figure.add_axes((0.115, 0.09, 0.745, 0.2), sharex=rows)
    _draw_lanes(rows, trace)
    _draw_tiers(bytes_of_tiers, trace)
    whole = trace.steps[-1].end
    rows.set_xlim(0, whole or 1.0)
    figure.text(0.115, 0.945, title, color=INK, fontsize=13, weight="bold", parse_math=False)
    text = f"{printable(trace.describe())}; lighter compute is forward"
    figure.text(0.115, 0.91, text, color=MUTED, fontsize=9.5, parse_math=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters without a glyph are drawn as boxes
        figure.savefig(path)


def _draw_lanes(axes: Any, trace: Trace) -> None:
    whole = trace.seconds or 1.0
    end = trace.steps[-1].end or 1.0
    for row, lane in enumerate(LANES):
        work = [span for span in trace.work if span.lane == lane]
        forward = [(span.start, span.end) for span in work if lane == "compute" and span.name.startswith("forward")]
        rest = [(span.start, span.end) for span in work if lane != "compute" or not span.name.startswith("forward")]
        for bars, colour in ((forward, _FORWARD), (rest, _COLOURS[lane])):
            shown = _coarse(bars, end)
            axes.broken_barh([(low, high - low) for low, high in shown], (row - 0.36, 0.72), color=colour, linewidth=0)
        busy = seconds(union([*forward, *rest]))
        axes.text(1.01, row, f"{100 * busy / whole:.0f} %", color=INK, **_beside(axes))
        exposed = trace.exposed(lane)
        if exposed >= 0.0005 * whole:
            axes.text(1.065, row, f"{exposed:.3g} s", color=INK, **_beside(axes))
    for text, place in (("busy", 1.01), ("exposed", 1.065)):
        axes.text(place, -1, text, color=MUTED, **_beside(axes))
    for step in trace.steps[1:]:
        axes.axvline(step.start, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.4, -0.6)
    axes.tick_params(axis="x", labelbottom=False)
    _plain(axes)


def _beside(axes: Any) -> dict[str, Any]:
    return {"transform": axes.get_yaxis_transform(), "fontsize": 9, "va": "center"}


def _draw_tiers(axes: Any, trace: Trace) -> None:
    end = trace.steps[-1].end
    for tier in TierKind:
        samples = [(sample.time, sample.nbytes[tier] / 1e9) for sample in trace.samples if tier in sample.nbytes]
        if samples:
            times, held = [time for time, _ in samples], [nbytes for _, nbytes in samples]
            axes.step([*times, end], [*held, held[-1]], where="post", color=_OF_TIER[tier], linewidth=1.6, label=tier)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB", color=MUTED, fontsize=9)
    axes.set_xlabel("seconds", color=MUTED, fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _coarse(bars: list[Interval], whole: float) -> list[Interval]:
    """Return the bars as they are visible."""
    width = whole / _FINEST
    return union((low, max(high, low + width)) for low, high in bars)
