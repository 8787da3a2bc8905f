"""The optimizer step on a CUDA device, beside a copy on the device."""

from __future__ import annotations

from typing import Any

from harness import Result, median_ratio, spread
from report.page import Report, setup, table

HEADER = ("rule", "parameter", "gradient", "moments", "bytes", "G/s", "GB/s", "÷ copy")
COPY_BYTES = 32


def over_copy(sample: dict[str, Any]) -> float:
    """GB/s over those of the copy."""
    return float(sample["bytes"]) / COPY_BYTES * median_ratio(sample["copy"], sample["seconds"])


def cells(n: int, sample: dict[str, Any]) -> list[str]:
    rate = n / spread(sample["seconds"]).median / 1e9
    name = sample["name"].split(" | ") if "|" in sample["name"] else [sample["name"], "", "", ""]
    return [*name, f"{sample['bytes']:.3g}", f"{rate:.1f}", f"{rate * sample['bytes']:.0f}", f"{over_copy(sample):.2f}"]


def tables(result: Result) -> str:
    return table(HEADER, [cells(result["n"], sample) for sample in result["samples"]])


def title(result: Result) -> str:
    return f"The optimizer step on {result['device']}, {result['n']:.0e} parameters"


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result), "table": tables(result)}


def figures(result: Result) -> dict[str, float]:
    return {f"{sample['name']} ÷ copy": over_copy(sample) for sample in result["samples"]}


REPORT = Report(title, fragments, figures)
