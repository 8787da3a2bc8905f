"""A step with clipping, with and without drafts, beside one without clipping."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Result
from report.page import RATIOS, Report, ratio, setup, table

FIRST = "no clipping"
LEGEND = f"""\
Medians of all steps. {RATIOS}
Bytes are those of a step for each parameter."""


def medians(result: Result, kind: str, name: str) -> list[float]:
    """Return the median of each process."""
    return [statistics.median(step[name] for step in run["steps"]) for run in result["runs"][kind]]


def ratios(result: Result, kind: str, to: str) -> list[float]:
    return [
        one / other for one, other in zip(medians(result, kind, "seconds"), medians(result, to, "seconds"), strict=True)
    ]


def fragments(result: Result) -> dict[str, str]:
    args, rows = result["args"], []
    first = f"{statistics.median(step['seconds'] for run in result['runs'][FIRST] for step in run['steps']):.2f}"
    for kind, runs in result["runs"].items():
        steps = [step for run in runs for step in run["steps"]]
        seconds, forward = (statistics.median(step[name] for step in steps) for name in ("seconds", "forward"))
        bytes_of = {name: runs[0][name] / runs[0]["parameters"] for name in ("read", "written")}
        rows.append(
            [
                kind,
                f"{seconds:.2f}",
                f"{forward:.2f}",
                ratio(f"{seconds:.2f}", first, ratios(result, kind, FIRST)),
                f"{bytes_of['read']:.1f} + {bytes_of['written']:.1f}",
                f"{max(run['peak_rss'] for run in runs) / 1e9:.2f}",
            ]
        )
    recipe = (
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW; every state on NVMe."
    )
    sizes = f"{args['rounds']} processes of {args['steps']} steps for each row."
    head = ["step", "s", "forward, s", f"÷ {FIRST}", "read + written", "peak RSS, GB"]
    return {"setup": setup(result, recipe, sizes), "table": f"{LEGEND}\n\n{table(head, rows)}"}


def figures(result: Result) -> dict[str, float]:
    found: dict[str, Any] = {
        f"{kind} ÷ {FIRST}": statistics.median(ratios(result, kind, FIRST)) for kind in result["runs"] if kind != FIRST
    }
    always = "clipping, always reached"
    found[f"{always} ÷ without drafts"] = statistics.median(ratios(result, always, f"{always}, no drafts"))
    return found


def parameters(result: Result) -> int:
    return int(next(iter(result["runs"].values()))[0]["parameters"])


REPORT = Report(
    lambda result: f"Clipping in a step of {parameters(result) / 1e6:.0f} M parameters on NVMe", fragments, figures
)
