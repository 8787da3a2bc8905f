"""Throttled devices: each, two equal ones, and a fast and a slow one."""

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


def over_sum(one: dict[str, float], who: str = "both", other: str = "the other") -> float:
    return one[who] / (one["one"] + one[other])


def steps(result: Result) -> dict[str, float]:
    """Median seconds of a step over the trainings, by shares."""
    return {who: median(samples, "seconds") for (who,), samples in grouped(result.get("steps", ()), "who").items()}


def weights(result: Result, who: str) -> str:
    """The weights of each training."""
    found = {each["round"]: each["weights"] for each in result["steps"] if each["who"] == who}
    return ", ".join(" : ".join(map(str, each)) for each in found.values())


def fragments(result: Result) -> dict[str, str]:
    found = speeds(result)
    rows = [
        [op, f"{one['one']:.3f}", f"{one['the other']:.3f}", f"{one['both']:.3f}", f"{over_sum(one):.2f}"]
        for op, one in found.items()
    ]
    header = ["", "one", "the other", "both, striped", "both ÷ their sum"]
    parts = {"setup": setup(result), "table": f"{LEGEND}\n\n{table(header, rows)}"}
    if "steps" not in result:
        return parts
    rows = [
        [
            op,
            f"{one['one']:.3f}",
            f"{one['slow']:.3f}",
            f"{one['round robin']:.3f}",
            f"{one['by speed']:.3f}",
            *(f"{over_sum(one, who, 'slow'):.2f}" for who in ("round robin", "by speed")),
        ]
        for op, one in found.items()
    ]
    header = ["", "fast", "slow", "round robin", "by speed", "round robin ÷ their sum", "by speed ÷ their sum"]
    parts["unequal"] = table(header, rows)
    rows = [[who, f"{seconds:.2f}", weights(result, who)] for who, seconds in steps(result).items()]
    parts["steps"] = table(["shares", "step, s", "weights of the folders in each training"], rows)
    return parts


def figures(result: Result) -> dict[str, float]:
    found = {f"{op}: both ÷ their sum": over_sum(one) for op, one in speeds(result).items()}
    if seconds := steps(result):
        found |= {
            f"{op}: by speed ÷ their sum": over_sum(one, "by speed", "slow") for op, one in speeds(result).items()
        }
        found["step: by speed ÷ round robin"] = seconds["by speed"] / seconds["round robin"]
    return found


REPORT = Report(lambda result: "Striping over throttled devices", fragments, figures)
