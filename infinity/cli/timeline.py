"""`infinity timeline`: prints the lanes of a trace, and draws them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import USAGE, fail, one_line_errors, printable, say, say_json
from infinity.cli.paths import check_output
from infinity.cli.trace_file import Trace, read_trace
from infinity.observe.intervals import seconds, union
from infinity.observe.timeline import LANES
from infinity.observe.units import show_bytes

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
            from infinity.cli.trace_picture import draw

            draw(png, trace, title=printable(file.name))
        if as_json:
            say_json({"steps": len(trace.steps), "seconds": trace.seconds, "lanes": found})
        else:
            say(*_shown(file, trace, found))


def _check_drawable(png: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        fail("--png needs matplotlib, which is missing: pip install matplotlib", USAGE)
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
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
