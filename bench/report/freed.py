"""Freed blocks: the memory that they take when kept, and the time that it takes to return them."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Result
from report.page import Report, setup, table

LEGEND = """\
Peaks are resident memory, medians of processes.
Steps are medians of the steps after the first of all processes, and first steps medians of processes.
In brackets: the lowest and the highest median of a process; of first steps, the lowest and the highest."""


def medians(runs: list[dict[str, Any]]) -> list[float]:
    """Return the median step of each process, without its first."""
    return [statistics.median(run["seconds"][1:]) for run in runs]


def step(runs: list[dict[str, Any]]) -> float:
    return float(statistics.median(seconds for run in runs for seconds in run["seconds"][1:]))


def cell(middle: float, each: list[float]) -> str:
    return f"{middle:.2f} ({min(each):.2f} to {max(each):.2f})"


def fragments(result: Result) -> dict[str, str]:
    args, rows = result["args"], []
    for kind, runs in result["runs"].items():
        first = [run["seconds"][0] for run in runs]
        peak = statistics.median(run["peak_rss"] for run in runs) / 1e6
        rows.append([kind, f"{peak:.0f}", cell(step(runs), medians(runs)), cell(statistics.median(first), first)])
    recipe = (
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW, checkpointed blocks; every state on NVMe."
    )
    sizes = f"{args['rounds']} processes of {args['steps']} steps for each row."
    head = ["freed blocks", "peak, MB", "step, s", "first step, s"]
    return {"setup": setup(result, recipe, sizes), "table": f"{LEGEND}\n\n{table(head, rows)}"}


def figures(result: Result) -> dict[str, float]:
    return {f"{kind}, step, s": step(runs) for kind, runs in result["runs"].items()}


def parameters(result: Result) -> int:
    return int(next(iter(result["runs"].values()))[0]["parameters"])


REPORT = Report(
    lambda result: f"Freed blocks kept and returned, {parameters(result) / 1e6:.0f} M parameters", fragments, figures
)
