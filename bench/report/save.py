"""The page of `save.py`: the time that a checkpoint costs a training with everything on NVMe."""

from __future__ import annotations

from typing import Any

from harness import Result, median
from report.page import Report, setup, table


def any_run(result: Result) -> dict[str, Any]:
    return dict(next(reversed(result["runs"].values()))[0])


def column(result: Result, kind: str) -> dict[str, float]:
    """Figures of one kind, by name."""
    runs, clip = result["runs"][kind], kind.partition(", clip ")[2]
    together, base = median(runs, "together"), median(result["runs"][f"none, clip {clip}"], "together")
    count = len(runs[0]["steps"])
    found = {
        "save_checkpoint returns after, s": median(runs, "stopped"),
        "checkpoint is whole after, s": median(runs, "whole"),
        f"{count} steps and the checkpoint, s": together,
        "of that, the checkpoint's cost, s": together - base,
    }
    for number in range(count):
        found[f"step {number + 1}, s"] = median([{"step": run["steps"][number]} for run in runs], "step")
    found["peak RSS, GB"] = max(run["peak_rss"] for run in runs) / 1e9
    found["before the save, GB"] = max(run["peak_rss_before"] for run in runs) / 1e9
    return found


def title(result: Result) -> str:
    parameters = any_run(result)["parameters"]
    return f"A checkpoint of {parameters / 1e6:.0f} M parameters, parameters and optimizer states on NVMe"


def recipe(result: Result) -> list[str]:
    args = result["args"]
    return [
        f"GPT-2: hidden {args['hidden']}, {args['layers']} layers, vocabulary {args['vocab']}, sequence "
        f"{args['sequence']}, batch {args['batch']}, bf16, AdamW.",
        f"The checkpoint has {any_run(result)['checkpoint_bytes'] / 1e9:.2f} GB.",
        f"Medians of {args['rounds']} processes, kinds interleaved; each trains {args['steps']} steps from the "
        "moment at which the checkpoint is requested, and waits for it at the end.",
    ]


def fragments(result: Result) -> dict[str, str]:
    columns = {kind: column(result, kind) for kind in result["runs"]}
    names = next(iter(columns.values()))
    rows = [[name, *(f"{one[name]:.2f}" for one in columns.values())] for name in names]
    return {"setup": setup(result, *recipe(result)), "table": table(["", *columns], rows)}


REPORT = Report(title, fragments)
