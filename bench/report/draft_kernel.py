"""A draft in memory beside an update in place."""

from __future__ import annotations

import statistics

from harness import Result
from report.page import RATIOS, Report, ratio, setup, table

KINDS = ("in place", "draft", "copy, then in place")
MOVED = {"fp32": 26, "bf16": 18, "8bit": 14}
"""Moments → bytes that an update in place moves for a parameter."""
CODES = {"8bit": 2}
"""Moments → bytes that a draft reads besides."""


def ratios(result: Result, moments: str, kind: str) -> list[float]:
    """Return each round's ratio to the update in place."""
    runs = result["runs"][moments]
    return [one / other for one, other in zip(runs[kind], runs[KINDS[0]], strict=True)]


def fragments(result: Result) -> dict[str, str]:
    args, rows = result["args"], []
    for moments, runs in result["runs"].items():
        theory = 1 + CODES.get(moments, 0) / MOVED[moments]
        times = [f"{statistics.median(runs[kind]) * 1e3:.1f}" for kind in KINDS]
        cells = [
            ratio(one, times[0], ratios(result, moments, kind)) for one, kind in zip(times[1:], KINDS[1:], strict=True)
        ]
        rows.append([moments, *times, *cells, f"{theory:.2f}"])
    recipe = f"{args['parameters']:.0e} parameters in bf16 with a remainder, AdamW, {args['threads']} threads."
    sizes = f"Medians of {args['rounds']} rounds. {RATIOS}"
    head = [
        "moments",
        *(f"{kind}, ms" for kind in KINDS),
        *(f"{kind} ÷ in place" for kind in KINDS[1:]),
        "bytes, draft ÷ in place",
    ]
    legend = "A draft writes past the caches, except for codes of 8 bits: the lines of these are read first."
    return {"setup": setup(result, recipe, sizes), "table": f"{legend}\n\n{table(head, rows)}"}


def figures(result: Result) -> dict[str, float]:
    return {
        f"{moments}: draft ÷ in place": statistics.median(ratios(result, moments, "draft"))
        for moments in result["runs"]
    }


REPORT = Report(lambda result: "A draft in memory", fragments, figures)
