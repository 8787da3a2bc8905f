"""Two throttled devices: one, the other, and both."""

from __future__ import annotations

from harness import Result, grouped, median
from report.page import Report, setup, table

LEGEND = "Mixed is read and written together, so its limit is twice as high."


def speeds(result: Result) -> dict[str, dict[str, float]]:
    """Median GB/s by op, then by devices."""
    found: dict[str, dict[str, float]] = {}
    for (op, who), samples in grouped(result["samples"], "op", "who").items():
        found.setdefault(op, {})[who] = median(samples, "gb_per_s")
    return found


def over_sum(one: dict[str, float]) -> float:
    return one["both"] / (one["one"] + one["the other"])


def fragments(result: Result) -> dict[str, str]:
    rows = [
        [op, f"{one['one']:.3f}", f"{one['the other']:.3f}", f"{one['both']:.3f}", f"{over_sum(one):.2f}"]
        for op, one in speeds(result).items()
    ]
    header = ["", "one", "the other", "both, striped", "both ÷ their sum"]
    return {"setup": setup(result), "table": f"{LEGEND}\n\n{table(header, rows)}"}


def figures(result: Result) -> dict[str, float]:
    return {f"{op}: both ÷ their sum": over_sum(one) for op, one in speeds(result).items()}


REPORT = Report(lambda result: "Two throttled devices", fragments, figures)
