"""The cost of checksums in a training step."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Result
from report.page import Report, setup, table

LEGEND = """\
Two engines of one process take turns, step by step; medians over all pairs of steps.
Time and CPU time are those with checksums beside those without, in percent of those without.
In brackets: the lowest and the highest median of a process."""


def costs(run: dict[str, Any], name: str) -> list[float]:
    """Return the cost in percent for each pair of steps."""
    return [100 * (checked / without - 1) for without, checked in run[name]]


def cost(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(each for run in runs for each in costs(run, name))


def cell(runs: list[dict[str, Any]], name: str) -> str:
    medians = [statistics.median(costs(run, name)) for run in runs]
    return f"{cost(runs, name):+.1f} % ({min(medians):+.1f} to {max(medians):+.1f})"


def parameters(result: Result) -> int:
    return int(next(iter(result["runs"].values()))[0]["parameters"])


def fragments(result: Result) -> dict[str, str]:
    args, rows = result["args"], []
    for kind, runs in result["runs"].items():
        without = statistics.median(pair[0] for run in runs for pair in run["seconds"])
        rows.append([kind, f"{runs[0]['moved'] / 1e9:.1f}", f"{without:.2f}", cell(runs, "seconds"), cell(runs, "cpu")])
    recipe = (
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW; every state on NVMe."
    )
    sizes = f"{args['rounds']} processes of {args['steps']} pairs of steps for each row."
    head = ["formats", "GB moved a step", "step without, s", "time", "CPU time"]
    return {"setup": setup(result, recipe, sizes), "table": f"{LEGEND}\n\n{table(head, rows)}"}


def figures(result: Result) -> dict[str, float]:
    return {f"{kind}, time, %": cost(runs, "seconds") for kind, runs in result["runs"].items()}


REPORT = Report(
    lambda result: f"Checksums in a step of {parameters(result) / 1e6:.0f} M parameters on NVMe", fragments, figures
)
