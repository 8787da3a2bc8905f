"""`infinity timeline`: prints the lanes of a trace, and draws them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import (
    GRID,
    INK,
    MUTED,
    USAGE,
    check_output,
    fail,
    one_line_errors,
    picture_formats,
    printable,
    say,
    say_json,
)
from infinity.cli.trace_file import Trace, read_trace
from infinity.observe.timeline import LANES, Interval, seconds, union
from infinity.sizes import show_bytes
from infinity.tier_kind import TierKind

_SHORT = 1.0
"""Seconds of all steps below which the table has milliseconds."""


def run(file: Path, png: Path | None, as_json: bool) -> None:
    """Print the lanes of `file`, and draw them to `png`."""
    with one_line_errors():
        if png is not None:
            check_output("--png", png)
            _check_drawable(png)
        trace = read_trace(file)
        found = lanes(trace)
        if png is not None:
            draw(png, trace, title=printable(file.name))
        if as_json:
            say_json({"steps": len(trace.steps), "seconds": trace.seconds, "lanes": found})
        else:
            say(*_shown(file, trace, found))


def _check_drawable(png: Path) -> None:
    formats = picture_formats()
    if not formats:
        fail("--png needs matplotlib, which is missing: pip install matplotlib", USAGE)
    if png.suffix.removeprefix(".").lower() not in formats:
        fail(f"--png {png} has no suffix of a picture: end it in one of {', '.join(formats)}", USAGE)


def lanes(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return lane → busy and exposed seconds, bytes, and bytes/s while it was busy (None: it moved nothing)."""
    found = {}
    for lane in LANES:
        work = [span for span in trace.work if span.lane == lane]
        busy = seconds(union((span.start, span.end) for span in work))
        moved = sum(span.nbytes for span in work)
        found[lane] = {
            "busy_seconds": busy,
            "exposed_seconds": trace.exposed(lane),
            "bytes": moved,
            "bytes_per_second": moved / busy if moved and busy else None,
        }
    return found


def _shown(file: Path, trace: Trace, found: dict[str, dict[str, Any]]) -> Iterator[str | RenderableType]:
    yield Text(printable(f"{file.name}, {trace.describe()}"), style="bold")
    whole = trace.seconds or 1.0
    unit, factor, digits = ("s", 1.0, 3) if whole >= _SHORT else ("ms", 1e3, 2)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    table.add_column("lane")
    for title in (f"busy {unit}", "share", f"exposed {unit}", "moved", "GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane, each in found.items():
        rate = each["bytes_per_second"]
        table.add_row(
            lane,
            f"{factor * each['busy_seconds']:.{digits}f}",
            f"{100 * each['busy_seconds'] / whole:.0f} %",
            "" if lane == "compute" else f"{factor * each['exposed_seconds']:.{digits}f}",
            show_bytes(each["bytes"]) if each["bytes"] else "–",
            f"{rate / 1e9:.2f}" if rate else "–",
        )
    yield table
    waited = sum(each["exposed_seconds"] for each in found.values())
    yield f"exposed: {factor * waited:.{digits}f} {unit}, {100 * waited / whole:.0f} % of the steps"


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
