"""Simulated steps: busy share and exposed time per lane of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import Result
from report.page import Report, setup, table

BUSY = "busy"
PHASES = ("forward", "backward", "step")
SHOWN = 5e-4
"""Least seconds that tables show."""
WORK = (
    "Seconds in which links and Adam worked, whether or not compute overlapped them; last column: seconds of each step "
    "from the second on."
)


def mean(run: Result, phases: tuple[str, ...], kind: str = "steps") -> dict[str, float]:
    """Lane → seconds of these phases, the mean over the third and later steps. kind: "steps" or "occupied"."""
    steps: list[dict[str, dict[str, float]]] = run[kind][1:]
    return {
        lane: sum(step[phase][lane] for step in steps for phase in phases) / len(steps) for lane in steps[0]["step"]
    }


def lanes(result: Result) -> list[str]:
    """Lanes that are exposed anywhere by half a millisecond or more."""
    runs = result["runs"].values()
    phases = [mean(run, (phase,)) for run in runs for phase in PHASES]
    return [lane for lane in phases[0] if lane != BUSY and any(phase[lane] >= SHOWN for phase in phases)]


def rows(result: Result, shown: list[str]) -> Iterator[list[str]]:
    for name, run in result["runs"].items():
        for phase in ("whole", *PHASES):
            found = mean(run, PHASES if phase == "whole" else (phase,))
            total = sum(found.values())
            label = [name, "**step**"] if phase == "whole" else ["", "engine.step()" if phase == "step" else phase]
            cells = [f"{total:.3f}", f"{100 * found[BUSY] / total:.1f} %" if total else "–"]
            yield [*label, *cells, *(f"{found[lane]:.3f}" if found[lane] >= SHOWN else "–" for lane in shown)]


def work(result: Result) -> Iterator[list[str]]:
    for name, run in result["runs"].items():
        found = [mean(run, (phase,), "occupied") for phase in PHASES[:2]]
        seconds = " ".join(f"{one:.3f}" for one in run["seconds"])
        yield [name, *(f"{one[lane]:.3f}" for lane in found[0] for one in found), seconds]


def work_head(result: Result) -> list[str]:
    lanes = next(iter(result["runs"].values()))["occupied"][0]["step"]
    return [
        "machine, update, unit size, budget",
        *(f"{lane}, {p}" for lane in lanes for p in PHASES[:2]),
        "steps from the second",
    ]


def title(result: Result) -> str:
    return f"A simulated step of {result['shape']['parameters'] / 1e9:.1f} B parameters, all states in host memory"


def fragments(result: Result) -> dict[str, str]:
    shape, shown = result["shape"], lanes(result)
    text = (
        f"GPT-2: hidden {shape['hidden_size']}, {shape['num_layers']} layers, {shape['num_attention_heads']} heads, "
        f"vocabulary {shape['vocab_size']}, sequence {shape['seq_length']}, batch {shape['batch']}, checkpointed "
        f"activations, {result['moments']} moments."
    )
    head = ["machine, update, unit size, budget", "phase", "s", "busy", *shown]
    return {
        "setup": setup(result, text, *(f"{line}." for line in result["assumptions"])),
        "table": table(head, rows(result, shown)),
        "work": f"{WORK}\n\n" + table(work_head(result), work(result)),
        "sites": "\n\n".join(_sites(name, run) for name, run in result["runs"].items()),
    }


def _sites(name: str, run: dict[str, Any]) -> str:
    """The longest exposed times of the last step, by the engine's lines."""
    longest = [(f"{seconds:.3f}", *_split(site)) for site, seconds in run["sites"].items() if seconds >= SHOWN]
    return f"{name}:\n\n" + table(["exposed s", "lane", "waits at"], longest[:6])


def _split(site: str) -> tuple[str, str]:
    lane, _, lines = site.partition(", ")
    return lane, lines


def figures(result: Result) -> dict[str, float]:
    found = {}
    for name, run in result["runs"].items():
        for phase in PHASES[:2]:
            one = mean(run, (phase,))
            found[f"{name}, {phase}: busy"] = one[BUSY] / sum(one.values())
    return found


REPORT = Report(title, fragments, figures)
