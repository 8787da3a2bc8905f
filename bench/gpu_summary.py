"""Print what `gpu_check.sh` found: each step's outcome, then the figures that are there. Writes summary.md and .json.

python bench/gpu_summary.py FOLDER

Exit status: 0 if all steps passed; 1 if one failed; 3 if none failed and some could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import harness
from report.page import load, table

STAGES = ("build", "tests", "kernels", "small", "large", "streams", "10b")
OUTCOMES = {"0": "passed", "skipped": "not run", "124": "out of time"}
"""Exit status of a step → outcome; other statuses are failures."""
STEP_COLUMNS = {
    "s/step (median)": ("seconds", 1, ".3f"),
    "waited, s": ("waited", 1, ".3f"),
    "tokens/s": ("tokens_per_second", 1, ".0f"),
    "peak device GB": ("device_peak_bytes", 1e9, ".2f"),
    "peak host GB": ("host_peak_bytes", 1e9, ".2f"),
}
"""Key of a run of `device_step.py`, unit, format."""


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """Return stage, step, outcome and seconds of each step, in the order of the stages."""
    found = []
    for path in (folder / "status").glob("*.*"):
        stage, step = path.name.split(".", 1)
        status, seconds = path.read_text().split()
        outcome = OUTCOMES.get(status, f"failed with status {status}")
        found.append({"stage": stage, "step": step, "outcome": outcome, "seconds": int(seconds)})
    return sorted(found, key=lambda one: (STAGES.index(one["stage"]), one["step"]))


def exit_status(found: list[dict[str, Any]]) -> int:
    """Return the exit status that the outcomes stand for. No outcome at all is a failure."""
    kinds = {one["outcome"] for one in found}
    return 1 if not kinds or kinds - {"passed", "not run"} else 3 if "not run" in kinds else 0


def figures(folder: Path) -> dict[str, Any]:
    """Return the results that are there, by the names of their files. A broken file is one that is not there."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem != "summary":
            try:
                found[path.stem] = load(path)
            except ValueError:
                print(f"{path} is not valid JSON; it is left out", file=sys.stderr)
    return found


def steps_table(result: harness.Result) -> str:
    """Return a row for each kind of training step; a kind that failed shows why."""
    rows = []
    for kind, run in result["runs"].items():
        shown = [
            f"{run[key] / unit:{form}}" if run.get(key) is not None else "" for key, unit, form in STEP_COLUMNS.values()
        ]
        rows.append([kind, *shown, str(run.get("error", ""))])
    return table(["kind", *STEP_COLUMNS, "error"], rows)


def links_table(result: harness.Result) -> str:
    rows = [
        [one["name"], f"{one['bytes'] / harness.spread(one['seconds']).median / 1e9:.1f}"] for one in result["copies"]
    ]
    rows.append(["registration, s/GB", f"{result['register_seconds_per_gb']:.3f}"])
    return table(["link", "GB/s"], rows)


def ten_billion_list(result: harness.Result) -> str:
    """Return the steps, and what each placement needs."""
    return "\n".join(_ten_billion(result))


def _ten_billion(result: harness.Result) -> Iterator[str]:
    for run in result.get("runs", []):
        kind = f"{run['placement']}, {run['moments']}"
        yield f"- {kind}: loss {run['losses'][-1]:.6f}, parameters {run['digest'][:12]}"
    for step in result.get("steps", []):
        speed = f"{step['seconds']:.3g} s, {step['model_tflops']:.3g} TFLOP/s"
        yield f"- step {step['step']}: loss {step['loss']:.4f}, {speed}"
    if "resident_tflops" in result:
        yield f"- resident blocks: {result['resident_tflops']:.3g} TFLOP/s"
    for placement, moments, needs in result.get("needs", []):
        missing = [f"{need['needed'] - need['available']:,} bytes of {need['memory']}" for need in needs
                   if need["needed"] > need["available"]]  # fmt: skip
        yield f"- {placement}, {moments}: " + (f"{' and '.join(missing)} are missing" if missing else "fits")


SECTIONS: dict[str, Callable[[harness.Result], str]] = {
    "links": links_table,
    "device_step": steps_table,
    "gpt2_10b": ten_billion_list,
}
"""Name of a benchmark → its section."""


def summary(found: list[dict[str, Any]], measured: dict[str, Any]) -> str:
    """Return the page: outcomes, then a section for each result."""
    rows = [[one["stage"], one["step"], one["outcome"], str(one["seconds"])] for one in found]
    parts = [table(["stage", "step", "outcome", "s"], rows)]
    for name, result in measured.items():
        show = SECTIONS.get(str(result.get("bench")))
        if show is not None and (text := show(result)):
            parts += [f"## {name}", text]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found, measured = outcomes(args.folder), figures(args.folder)
    text = f"# {device}, torch {torch.__version__}\n\n{summary(found, measured)}\n"
    print(text)
    harness.replace_text(args.folder / "summary.md", text)
    head = {"device": device, "machine": harness.machine(), "outcomes": found}
    harness.write_json(args.folder / "summary.json", {**head, "figures": measured})
    status = exit_status(found)
    print({0: "all steps passed", 1: "some steps FAILED", 3: "none failed, some could not run"}[status])
    return status


if __name__ == "__main__":
    sys.exit(main())
