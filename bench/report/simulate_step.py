"""Simulated steps: busy share and exposed time per lane."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Result
from report.page import Report, setup, table

SHOWN = 5e-4
"""Least seconds that tables show."""
CASE = "machine, case, budget, clock"
NAMES = {
    "fingerprint": "fingerprints",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "reduce": "gradients on host",
}
"""Lane → its name in tables, if that is another."""


def lanes(result: Result) -> list[str]:
    """Lanes that are exposed anywhere by half a millisecond or more."""
    runs = [run["lanes"] for run in result["runs"].values()]
    every = dict.fromkeys(lane for run in runs for lane in run if lane not in ("busy", "host"))
    return [lane for lane in (*every, "host") if any(run.get(lane, 0.0) >= SHOWN for run in runs)]


def rows(result: Result, shown: list[str]) -> Iterator[list[str]]:
    for name, run in result["runs"].items():
        found = run["lanes"]
        total = sum(found.values())
        yield [name, f"{total:.3f}", f"{100 * found['busy'] / total:.1f} %", *(_seconds(found, one) for one in shown)]


def _seconds(found: dict[str, float], lane: str) -> str:
    return f"{found[lane]:.3f}" if found.get(lane, 0.0) >= SHOWN else "–"


def waits(result: Result) -> Iterator[list[str]]:
    """For each reason: waits, seconds for which the device stood still."""
    reasons = waited(result)
    for name, run in result["runs"].items():
        found = run["waits"]
        cells = (_waited(found.get(one)) for one in reasons)
        yield [name, f"{run['adam']:.3f}", *cells]


def _waited(wait: dict[str, float] | None) -> str:
    return "–" if wait is None else f"{wait['count']}: {abs(wait['stood_still']):.3f}"


def waited(result: Result) -> list[str]:
    return list(dict.fromkeys(reason for run in result["runs"].values() for reason in run["waits"]))


def title(result: Result) -> str:
    return f"A simulated step of {result['shape']['parameters'] / 1e9:.1f} B parameters"


def fragments(result: Result) -> dict[str, str]:
    shape, shown = result["shape"], lanes(result)
    text = (
        f"GPT-2: hidden {shape['hidden_size']}, {shape['num_layers']} layers, {shape['num_attention_heads']} heads, "
        f"vocabulary {shape['vocab_size']}, sequence {shape['seq_length']}, batch {shape['batch']}, checkpointed "
        "activations."
    )
    head = [CASE, "s", "busy", *(NAMES.get(lane, lane) for lane in shown)]
    return {
        "setup": setup(result, text, *(f"{line}." for line in result["assumptions"])),
        "table": table(head, rows(result, shown)),
        "waits": table([CASE, "Adam", *waited(result)], waits(result)),
    }


def figures(result: Result) -> dict[str, float]:
    return {f"{name}: busy": run["lanes"]["busy"] / sum(run["lanes"].values()) for name, run in result["runs"].items()}


REPORT = Report(title, fragments, figures)
