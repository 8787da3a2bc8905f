"""The table of `infinity bench-links`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.console import printable
from infinity.observe.units import show_bytes, show_flops
from infinity.sim.links import BANDWIDTHS, Links


def shown(links: Links) -> list[RenderableType]:
    """Return a table of the bandwidths under their names in the JSON, and the machine."""
    machine: Mapping[str, Any] = links.facts["machine"]
    measurement: Mapping[str, Any] = links.facts["measurement"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column("measured on", no_wrap=True)
    for name, rate, show in _rates(links):
        how, ends = measurement["how"][name], [measurement[end].get(name) for end in ("lowest", "highest")]
        if rate is None:
            table.add_row(name, "–", "", how, style="dim")
        else:
            table.add_row(name, show(rate), _range(*map(show, ends)), how)
    table.add_row("baseline_rss", show_bytes(links.baseline_rss), "", "after training one small layer")
    folders = ", ".join(f"{path} ({kind})" for path, kind in machine["folders"].items())
    parts = (machine["processor"], f"{machine['cores']} cores", f"torch {machine['torch']}")
    where = f"drive: {folders}, {'direct' if machine['direct'] else 'through the page cache'}"
    device = f"computes on: {machine['device']}"
    return [Text(printable(", ".join(parts)), style="bold"), Text(printable(where)), Text(printable(device)), table]


def _rates(links: Links) -> Iterator[tuple[str, float | None, Callable[[float], str]]]:
    for name in BANDWIDTHS:
        yield name, getattr(links, name), lambda rate: f"{show_bytes(rate)}/s"
    for dtype, flops in links.flops.items():
        yield f"flops.{dtype}", flops, lambda rate: f"{show_flops(rate)}/s"
    for dtype, weights in links.weights.items():
        yield f"weights.{dtype}", weights, lambda rate: f"{show_bytes(rate)}/s"


def _range(low: str, high: str) -> str:
    """("1.5 GB/s", "2.5 GB/s") -> '1.5 to 2.5'; with both units if they differ."""
    (number, unit), (last, last_unit) = low.split(), high.split()
    return f"{number} to {last}" if unit == last_unit else f"{low} to {high}"
