"""Exposed time by the order in which a budget gives room to states."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Result
from report.page import Report, setup, table

ENGINE = "**the engine's**"


def title(result: Result) -> str:
    return "Orders in which a budget gives room to states"


def excess(run: dict[str, Any], exposed: float) -> float:
    """Seconds of a step with these exposed seconds, by those with the best order, − 1."""
    best = min(run["engine"], *run["orders"].values())
    return float((run["compute"] + exposed) / (run["compute"] + best) - 1)


def figures(result: Result) -> dict[str, float]:
    return {f"{name}: engine ÷ best − 1": excess(run, run["engine"]) for name, run in result["runs"].items()}


def fragments(result: Result) -> dict[str, str]:
    shape = result["shape"]
    text = (
        f"GPT-2: {shape['parameters'] / 1e6:.0f} M parameters, hidden {shape['hidden_size']}, {shape['num_layers']} "
        f"layers, sequence {shape['seq_length']}, checkpointed activations, bf16, all states on nvme."
    )
    return {
        "setup": setup(result, text, *(assumed(name, one["links"]) for name, one in result["machines"].items())),
        "summary": summary(result),
        "cases": each(result),
    }


def assumed(name: str, links: dict[str, Any]) -> str:
    copies = links["host_to_device"] / 1e9
    drive = "/".join(f"{links[key] / 1e9:g}" for key in ("nvme_read", "nvme_write", "nvme_mixed"))
    compute = links["flops"]["bfloat16"] / 1e12
    between = "" if name == "cpu" else f", {copies:g} GB/s to and from the device"
    return (
        f"{name}: drive {drive} GB/s read/written/mixed, host memory {links['memory'] / 1e9:g} GB/s{between}, "
        f"{compute:g} TFLOP/s."
    )


def summary(result: Result) -> str:
    """How much longer a step takes than with the best order of its case, by order and kind of step."""
    on_host = {name: name.startswith("cpu, ") for name in result["runs"]}
    parts = []
    for title, chosen in (("Machines with a GPU", False), ("The host computes", True)):
        runs = {name: run for name, run in result["runs"].items() if on_host[name] == chosen}
        if runs:
            parts.append(f"{title}: median and largest excess of a step over the best order of its case.")
            parts.append(_excesses(runs))
    return "\n\n".join(parts)


def _excesses(runs: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(map(_kind, runs)))
    rows = []
    for order in (ENGINE, *next(iter(runs.values()))["orders"]):
        found = [[excess(run, _exposed(run, order)) for name, run in runs.items() if _kind(name) == k] for k in kinds]
        rows.append([order, *(f"{statistics.median(values):.1%}, {max(values):.1%}" for values in found)])
    return table(["order", *(kind or "plain" for kind in kinds)], rows)


def _kind(name: str) -> str:
    """Clipping and micro-batches of a case."""
    return ", ".join(part for part in name.split(", ") if part == "clipping" or part.endswith("micro-batches"))


def _exposed(run: dict[str, Any], order: str) -> float:
    return float(run["engine"] if order == ENGINE else run["orders"][order])


def each(result: Result) -> str:
    rows = []
    for name, run in result["runs"].items():
        best = min(run["orders"], key=run["orders"].__getitem__)
        row = [name, f"{run['compute']:.3f}", f"{run['engine']:.3f}", f"{run['orders'][best]:.3f}", best]
        worst = max(run["orders"].values())
        rows.append([*row, f"{worst:.3f}", f"{excess(run, run['engine']):.1%}"])
    head = ["case", "compute, s", "exposed, s", "best order, s", "best order", "worst order, s", "step above the best"]
    return table(head, rows)


REPORT = Report(title, fragments, figures)
