"""The page of `beside_deepspeed.py`: start, step and memory of one script under DeepSpeed and Infinity, and faults."""

from __future__ import annotations

from typing import Any

from harness import Result, median
from report.page import RATIOS, Report, ratio, setup, table

ENGINES = ("DeepSpeed", "Infinity")
PLACEMENTS = {"cpu": "host memory", "nvme": "NVMe"}


def rows(result: Result) -> list[list[str]]:
    """Figures by placement: one cell an engine, and their ratio."""
    found = []
    first = result["first"]
    if first:
        found.append(["first start on a machine, s", *(f"{first[engine]['start']:.1f}" for engine in ENGINES), ""])
    for placement, title in PLACEMENTS.items():
        runs = {engine: result["runs"][f"{engine}, {placement}"] for engine in ENGINES}
        steps = {engine: [median([{"s": s} for s in run["steps"]], "s") for run in runs[engine]] for engine in ENGINES}
        for name, values, digits in (
            ("start, s", {engine: [run["start"] for run in runs[engine]] for engine in ENGINES}, 1),
            ("step, s", steps, 2),
            ("peak RSS, GB", {engine: [run["peak_rss"] / 1e9 for run in runs[engine]] for engine in ENGINES}, 2),
            ("left on disk, MB", {engine: [run["left"] / 1e6 for run in runs[engine]] for engine in ENGINES}, 0),
        ):
            if not any(map(any, values.values())):
                continue
            middle = [f"{median([{'x': x} for x in values[engine]], 'x'):.{digits}f}" for engine in ENGINES]
            rounds = [own / other for own, other in zip(values["Infinity"], values["DeepSpeed"], strict=True)]
            beside = ratio(middle[1], middle[0], rounds)
            found.append([f"{title}: {name}", *middle, beside])
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
        "table": table(["", *ENGINES, "ratio"], rows(result)),
        "faults": table(
            ["all states on NVMe", *ENGINES],
            [[case, *(outcome(faults[f"{engine}, {case}"]) for engine in ENGINES)] for case in cases],
        ),
    }


def title(result: Result) -> str:
    return "One script under DeepSpeed and under Infinity"


REPORT = Report(title, fragments)
