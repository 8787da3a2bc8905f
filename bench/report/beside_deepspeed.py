"""The page of `beside_deepspeed.py`: start, step and memory of a plain loop, DeepSpeed and Infinity, and faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Result, spread
from report.page import RATIOS, Report, ratio, setup, table

ENGINES = ("DeepSpeed", "Infinity")
COLUMNS = {"plain": "plain PyTorch", "DeepSpeed": "DeepSpeed", "Infinity": "Infinity"}
PLACEMENTS = {"cpu": "host memory", "nvme": "NVMe"}
NONE = "–"


FIGURES: dict[str, tuple[Callable[[dict[str, Any]], float], int]] = {
    "start, s": (lambda run: run["start"], 1),
    "step, s": (lambda run: spread(run["steps"]).median, 2),
    "peak RSS, GB": (lambda run: run["peak_rss"] / 1e9, 2),
    "left on disk, MB": (lambda run: run["left"] / 1e6, 0),
}
"""Figure of a process and its digits, by the name of a row."""


def rows(result: Result) -> list[list[str]]:
    """Figures by placement: one cell a column, and Infinity's ratio to DeepSpeed."""
    found = []
    first = result["first"]
    if first:
        seconds = [f"{first[engine]['start']:.1f}" for engine in ENGINES]
        found.append(["first start on a machine, s", NONE, *seconds, ""])
    for placement, title in PLACEMENTS.items():
        runs = {column: result["runs"].get(f"{column}, {placement}", []) for column in COLUMNS}
        for name, (figure, digits) in FIGURES.items():
            values = {column: [figure(run) for run in runs[column]] for column in COLUMNS}
            if not any(map(any, values.values())):
                continue
            cells = {
                column: f"{spread(figures).median:.{digits}f}" if figures else NONE
                for column, figures in values.items()
            }
            rounds = [own / other for own, other in zip(values["Infinity"], values["DeepSpeed"], strict=True)]
            beside = ratio(cells["Infinity"], cells["DeepSpeed"], rounds)
            found.append([f"{title}: {name}", *cells.values(), beside])
    return found


def outcome(found: dict[str, Any]) -> str:
    """The end of a process, and the bytes that it left."""
    status = found["status"]
    if status is None:
        end = "hangs"
    elif status < 0:
        end = f"ends with signal {-status}"
    else:
        end = f"ends with status {status}" if status else "reports success"
    message = f": `{found['error']}`" if found["error"] and status != 0 else ""
    return f"{end}{message}; {found['left'] / 1e6:.0f} MB left on disk"


def fragments(result: Result) -> dict[str, str]:
    args, faults = result["args"], result["faults"]
    cases = list(dict.fromkeys(kind.partition(", ")[2] for kind in faults))
    return {
        "setup": setup(
            result,
            f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
            f"{args['sequence']}, batch {args['batch']}, bf16, AdamW, clipping 1.0, stage 3, one process.",
            f"Medians of {args['rounds']} processes of {args['steps']} steps each, kinds interleaved.",
            RATIOS,
        ),
        "table": table(["", *COLUMNS.values(), "Infinity ÷ DeepSpeed"], rows(result)),
        "faults": table(
            ["all states on NVMe", *ENGINES],
            [[case, *(outcome(faults[f"{engine}, {case}"]) for engine in ENGINES)] for case in cases],
        ),
    }


def title(result: Result) -> str:
    return "One training in plain PyTorch, DeepSpeed and Infinity"


REPORT = Report(title, fragments)
