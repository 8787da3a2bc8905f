"""Host overhead per unit: steps of the engine beside those of the plain loop, with tiny units."""

from __future__ import annotations

from typing import Any

from harness import Result, median
from report.page import Report, setup, table

HEADER = ("measurement", "code", "units", "initialize, s", "close, s", "step, ms", "plain, ms", "ratio to plain",
          "overhead per unit, ms", "CPU per unit, ms", "ratio of overheads")  # fmt: skip
LEGEND = """\
Overhead = (median step of the engine - median step of the plain loop with torch.optim.AdamW) / units.
Ratio of overheads: that of this code over that of the other."""


def figures_of(result: Result, row: dict[str, str]) -> dict[str, float]:
    """Medians of one measurement with one tree, in seconds, and its overhead per unit."""
    own = result["samples"][f"{row['tree']}: {row['measurement']}"]
    plain = result["samples"][row["plain"]]
    found = {key: median(own, key) for key in ("initialize", "close", "step", "cpu", "units")}
    found["plain"] = median(plain, "step")
    found["overhead"] = (found["step"] - found["plain"]) / found["units"]
    found["cpu_overhead"] = (found["cpu"] - median(plain, "cpu")) / found["units"]
    return found


def rows(result: Result) -> list[list[str]]:
    """Cells as HEADER names them."""
    found = [(row, figures_of(result, row)) for row in result["rows"]]
    now = {row["measurement"]: one["overhead"] for row, one in found if row["tree"] == "now"}
    return [
        [
            row["measurement"],
            row["tree"],
            f"{one['units']:.0f}",
            f"{one['initialize']:.2f}",
            f"{one['close']:.2f}",
            f"{1e3 * one['step']:.1f}",
            f"{1e3 * one['plain']:.1f}",
            f"{one['step'] / one['plain']:.2f}",
            f"{1e3 * one['overhead']:.3f}",
            f"{1e3 * one['cpu_overhead']:.3f}",
            "" if row["tree"] == "now" else f"{now[row['measurement']] / one['overhead']:.2f}",
        ]
        for row, one in found
    ]


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result), "table": f"{LEGEND}\n\n{table(HEADER, rows(result))}"}


def figures(result: Result) -> dict[str, float]:
    found = {}
    for row in result["rows"]:
        found[f"{row['tree']}: {row['measurement']}, overhead per unit, ms"] = 1e3 * figures_of(result, row)["overhead"]
    return found


def show(result: Result) -> None:
    """Print the table to the terminal."""
    from rich.console import Console
    from rich.table import Table

    shown: Any = Table(title="Host overhead")
    for title in HEADER:
        shown.add_column(title, justify="left" if title in HEADER[:2] else "right")
    for cells in rows(result):
        shown.add_row(*cells)
    console = Console()
    (console if console.is_terminal else Console(width=180)).print(shown)


REPORT = Report(lambda result: "Host overhead per unit", fragments, figures)
