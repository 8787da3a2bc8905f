"""Predictions, written down before any measurement, and functions that read the measured figures.

They assume an H100 with matrix products at 670 TFLOP/s, 52 GB/s in each direction, and host memory of 100 to 150 GB/s.
The model of 10 B has 10.28 B parameters, a batch of 10 × 1024 tokens and moments of 8 bits in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

Figures = Mapping[str, Any]
"""Name of a result file without its suffix → its content."""


class Prediction(NamedTuple):
    """A quantity with the range that is expected, and the function that reads it from the results of a call.

    low, high: bounds in `unit`. A result outside of them is no failure.
    """

    quantity: str
    low: float
    high: float
    unit: str
    read: Callable[[Figures], float | None]

    @property
    def expected(self) -> str:
        span = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{span} {self.unit}".strip()


def _link(name: str, size: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        for one in figures.get("links", {}).get("copies", []):
            if one["name"] == name and one["size"] == size:
                return float(one["bytes"] / median(one["seconds"]) / 1e9)
        return None

    return read


def _bandwidth(key: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        value = figures.get("bandwidths", {}).get(key)
        return None if value is None else value / 1e9

    return read


def _kind(kind: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        result = figures.get("gpt2-1.3b", {})
        if result.get("moments", "fp32") != "fp32":  # the call `nvme` measures others
            return None
        value = result.get("runs", {}).get(kind, {}).get("seconds")
        return None if value is None else float(value)

    return read


def _steady(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps after the two that warm up."""
    return list(result.get("steps", []))[2:]


def _step(run: str, key: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        found = [step[key] for step in _steady(figures.get(run, {}))]
        return median(found) if found else None

    return read


def _idle(run: str, reason: str) -> Callable[[Figures], float | None]:
    """Return a reader of the seconds a step for which compute stood still, for one reason."""

    def read(figures: Figures) -> float | None:
        found = [step["waits"].get(reason, {}).get("stood_still", 0.0) for step in _steady(figures.get(run, {}))]
        return median(found) if found else None

    return read


def _of(run: str, *keys: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        value: Any = figures.get(run)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    return read


def _busy(figures: Figures) -> float | None:
    shares = figures.get("trace", {}).get("shares") or [{}]
    value = shares[-1].get("kernels")
    return None if value is None else float(value)


PREDICTIONS = (
    Prediction("link, host to device, 4 MiB", 45, 55, "GB/s", _link("to device, device.copy", "4MiB")),
    Prediction("link, device to host, 4 MiB", 45, 55, "GB/s", _link("from device, device.copy", "4MiB")),
    Prediction("host memory, native Adam", 100, 150, "GB/s", _bandwidth("memory")),
    Prediction("1.3 B, plain PyTorch: step", 0.15, 0.19, "s", _kind("plain, clip 0")),
    Prediction("1.3 B, all on the device: step", 0.15, 0.2, "s", _kind("none, clip 0")),
    Prediction("1.3 B, fp32 moments in host memory: step", 0.35, 0.45, "s", _kind("cpu, clip 0")),
    Prediction("1.3 B, FSDP2 with CPU offload: step", 1.0, 1.3, "s", _kind("fsdp2 cpu, clip 0")),
    Prediction("10 B, resident blocks, recomputed", 560, 620, "TFLOP/s", _of("10b-bf16", "resident_tflops")),
    Prediction("10 B: construction", 60, 110, "s", _of("10b-bf16", "construction_seconds")),
    Prediction("10 B, bf16: step", 1.75, 2.4, "s", _step("10b-bf16", "seconds")),
    Prediction("10 B, fp16: step", 2.3, 2.8, "s", _step("10b-fp16", "seconds")),
    Prediction("10 B, bf16: CPU Adam", 0.87, 1.3, "s a step", _step("10b-bf16", "update_seconds")),
    Prediction("10 B, fp16: CPU Adam", 1.0, 1.5, "s a step", _step("10b-fp16", "update_seconds")),
    Prediction("10 B, bf16: idle, `gradients`", 0.15, 0.8, "s a step", _idle("10b-bf16", "gradients")),
    Prediction("10 B, bf16: idle, `edits`", 0.03, 0.06, "s a step", _idle("10b-bf16", "edits")),
    Prediction("10 B, bf16: idle, `small copies`", 0.0, 0.4, "s a step", _idle("10b-bf16", "small copies")),
    Prediction("1.3 B, `cpu`: device busy", 0.38, 0.5, "of two steps", _busy),
)


def rows(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield quantity, expectation and figure of each prediction; an empty figure was not measured."""
    for one in PREDICTIONS:
        try:
            value = one.read(figures)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a result that was cut off
            value = None
        yield one.quantity, one.expected, "" if value is None else f"{value:.3g}"


def table(figures: Figures) -> str:
    """Return the predictions beside the measured figures, as a table of Markdown."""
    lines = ["| quantity | expected | measured |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows(figures))])
