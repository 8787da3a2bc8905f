"""One change, before and after: steps of the same kind with two builds of the package, in turns.

    python bench/gpu_fix.py --before old-site --after new-site --size 1.3b --kinds cpu --clips 0 1 --output fix.json

A site is a folder with an installed package. Each run is a process of its own. A round begins if the longest one so far
would end within `--total`. The file is written after each run. Prints the median and the range of after ÷ before, the
seconds of a step within a round. Exit status 1 if a kind has no round with both.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import device_step
import harness

WHICH = ("before", "after")


def run(args: argparse.Namespace, which: str, what: str) -> harness.Result:
    """Return a run of `device_step.py` with one of the packages; {"error": reason} if it fails."""
    site = str(getattr(args, which))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))}
    flags = ["--size", args.size, "--steps", str(args.steps), "--moments", args.moments]
    flags += ["--nvme-path", args.nvme_path, "--only", what]
    limit = ["timeout", "--foreground", "--signal", "ABRT", "--kill-after", "10", str(args.seconds)]
    try:
        return harness.run_child(device_step.__file__, flags, before=limit, environment=environment)
    except SystemExit as error:
        return {"error": device_step.failure(error)}


def ratios(runs: list[dict[str, Any]], what: str) -> list[float]:
    """Return after ÷ before of each round that has both."""
    pairs = [(one["before"], one["after"]) for one in runs if one["what"] == what and {*WHICH} <= set(one)]
    return [b["seconds"] / a["seconds"] for a, b in pairs if "seconds" in a and "seconds" in b]


def reason(run: harness.Result) -> str:
    """Return why a run has no figures; empty if it has."""
    return str(run.get("error") or run.get("left_out") or "")


def lines(result: harness.Result) -> list[str]:
    """Return a line for each kind."""
    found = []
    for what in dict.fromkeys(one["what"] for one in result["rounds"]):
        within = ratios(result["rounds"], what)
        if within:
            runs = [one.get(which, {}) for one in result["rounds"] if one["what"] == what for which in WHICH]
            low, high = min(within), max(within)
            text = f"{harness.spread(within).median:.3f} ({low:.3f} to {high:.3f}, {len(within)} rounds)"
            text += "".join(f", without one: {why}" for why in filter(None, map(reason, runs)))
            losses = {run["loss"] for run in runs if "loss" in run}
            found.append(f"{what}: after ÷ before {text}; {'same losses' if len(losses) == 1 else 'losses DIFFER'}")
        else:
            errors = {reason(one.get(which, {})) for one in result["rounds"] for which in WHICH} - {""}
            found.append(f"{what}: no round has both; {'; '.join(sorted(errors))}")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the package before the change")
    parser.add_argument("--after", type=Path, required=True, help="folder of the package after it")
    parser.add_argument("--size", choices=device_step.SIZES, default="1.3b")
    parser.add_argument("--kinds", nargs="+", choices=device_step.KINDS, default=["cpu"], metavar="KIND")
    parser.add_argument("--clips", nargs="+", type=float, default=[0.0, 1.0], metavar="NORM", help="0: none (0 1)")
    parser.add_argument("--moments", choices=("fp32", "bf16", "8bit"), default="8bit")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a run (6)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds at most (5)")
    parser.add_argument("--seconds", type=int, default=90, help="seconds after which a run is stopped (90)")
    parser.add_argument("--total", type=float, default=420, help="seconds in which rounds begin (420)")
    parser.add_argument("--nvme-path", default="/tmp", help="folder for states on NVMe (/tmp)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON to write")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    began, longest = time.monotonic(), 0.0
    result: harness.Result = {**harness.head("gpu_fix", path=args.nvme_path), "rounds": []}
    for number in range(args.rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest > args.total:
            break
        for what in [f"{kind}, clip {clip:g}" for clip in args.clips for kind in args.kinds]:
            one: dict[str, Any] = {"what": what}
            result["rounds"].append(one)
            for which in WHICH if number % 2 == 0 else WHICH[::-1]:
                one[which] = run(args, which, what)
                result["lines"] = lines(result)  # each time: the run may be cut off
                harness.write_json(args.output, result)
                shown = reason(one[which]) or f"{one[which]['seconds']:.4g} s a step"
                print(f"round {number + 1}, {what}, {which}: {shown}", flush=True)
        longest = max(longest, time.monotonic() - round_began)
    print(*result["lines"], sep="\n")
    return int(not all(ratios(result["rounds"], one["what"]) for one in result["rounds"]))


if __name__ == "__main__":
    sys.exit(main())
