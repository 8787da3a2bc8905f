"""One training step beside other engines that offload: the plain PyTorch loop, Infinity, DeepSpeed ZeRO-3, FSDP2 with
CPUOffloadPolicy and torchao's CPUOffloadOptimizer, on one CPU.

    pip install deepspeed==0.19.8 torchao==0.18.0     # into an environment of their own that has this project, too
    python bench/peers/run.py --nvme-path /local_nvme --deepspeed-python PYTHON --torchao-python PYTHON
    python bench/peers/run.py --nvme-path /tmp --shapes tiny --peers plain "infinity nvme" --results /tmp/peers

All train the same GPT-2 on the same batches; their losses are checked to agree. Every measurement is a process of its
own, and contenders take turns, round by round. Bytes are the kernel's count of what the process read from and wrote to
drives, from the fourth step on. A contender that is not installed, or fails, is listed with the reason, tried once.
DeepSpeed compiles its extensions in its first process, which takes minutes and a C++ compiler: a short run before
(`--shapes tiny --peers "deepspeed cpu" "deepspeed nvme"`) leaves them in TORCH_EXTENSIONS_DIR. Writes
bench/results/peers.json, then draws peers.md and peers.png from it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: its modules are named from bench/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import harness
import training
from peers.contenders import PEERS, job_environment
from report.page import publish
from zero_contenders import InfinityLoop

SHAPES = {"tiny": training.Shape(32, 2, 2, 16, 2, vocab=64), **training.SHAPES}
WARM_UP = 4
"""Steps that are not timed: Infinity and DeepSpeed record a trace in the first; Infinity frees the bytes of gradients
after the third; the fourth follows a pause, at which the count of bytes begins."""
AGREE = 1e-2
"""Largest relative difference of losses after equally many steps: contenders round to bf16 at different places."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "peers")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["small", "S"])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender and shape")
    parser.add_argument("--steps", type=int, default=2, help=f"timed steps of each process, after {WARM_UP}")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    for package in ("deepspeed", "torchao"):
        text = f"the Python of an environment with {package} and this project"
        parser.add_argument(f"--{package}-python", metavar="PATH", default=sys.executable, help=text)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a process counts as hanging")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device, args.dtype, args.clip, args.ranks = "cpu", "bf16", 0.0, 1
    return args


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def measure(args: argparse.Namespace, kind: str) -> harness.Result:
    """Train one contender in this process."""
    shape, _, name = kind.partition(", ")
    peer = PEERS[name]
    if peer.package and find_spec(peer.package) is None:
        return {"reason": f"{peer.requirement} is not installed"}
    known = {"version": version(peer.package) if peer.package else ""}
    print(json.dumps(known), flush=True)  # if it fails, this is its last JSON
    logging.getLogger("infinity").setLevel(logging.WARNING)
    args.shape = SHAPES[shape]
    vars(args).update(asdict(args.shape))
    loop, batch = peer.make(args), training.random_batches(args)
    seconds, losses = [], []
    for number in range(WARM_UP + args.steps):
        tokens, targets = batch()
        if number == WARM_UP - 1:
            before = drive_bytes_at_rest()
        began = time.perf_counter()
        losses.append(float(loop.step(tokens, targets)))
        seconds.append(time.perf_counter() - began)
    moved = (now - then for now, then in zip(drive_bytes_at_rest(), before, strict=True))
    read, written = (nbytes / (args.steps + 1) for nbytes in moved)
    result = known | {
        "steps": seconds[WARM_UP:],
        "losses": losses,
        "peak_rss": harness.peak_rss(),
        "read": read,
        "written": written,
    }
    close(loop)
    return result


def drive_bytes_at_rest() -> tuple[int, int]:
    """Bytes read and written so far, after the transfers that a step left under way have ended."""
    time.sleep(1)
    return harness.drive_bytes()


def close(loop: Any) -> None:
    import torch.distributed as dist

    if isinstance(loop, InfinityLoop):
        loop.engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the rounds --------------------------------------------------------------------------------------------------------


def child(args: argparse.Namespace, kind: str) -> harness.Result:
    """Measure in a process of its own; `reason` if that failed."""
    package = PEERS[kind.partition(", ")[2]].package
    python = getattr(args, f"{package}_python") if package else sys.executable
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as states:  # DeepSpeed leaves its files
        words = [*sys.argv[1:], "--only", kind, "--nvme-path", states]
        found = harness.attempt([python, __file__, *words], environment=job_environment(), limit=args.limit)
    if found["status"] == 0:
        return found
    end = "it hung" if found["status"] is None else f"it ended with status {found['status']}"
    return {**found, "reason": found["error"] or end}


def collect(args: argparse.Namespace) -> dict[str, list[harness.Result]]:
    """Results by "shape, contender", in the order of rounds. A kind that failed has that result in all rounds."""
    failed: dict[str, harness.Result] = {}

    def run(kind: str) -> harness.Result:
        found = failed.get(kind) or child(args, kind)
        if "reason" in found:
            failed[kind] = found
        return found

    def show(found: harness.Result) -> str:
        if "reason" in found:
            return f"did not run: {found['reason']}"
        return f"{harness.spread(found['steps']).median:.2f} s a step, {found['peak_rss'] / 1e9:.2f} GB"

    kinds = [f"{shape}, {name}" for shape in args.shapes for name in args.peers]
    return harness.collect(kinds, args.rounds, run, show)


def check_losses(args: argparse.Namespace, runs: dict[str, list[harness.Result]]) -> float:
    """The largest relative difference of losses of a shape; ends the run if contenders do not train the same."""
    apart = 0.0
    for shape in args.shapes:
        losses = {kind: [one["losses"] for one in found if "losses" in one] for kind, found in runs.items()}
        mine = {kind: found for kind, found in losses.items() if kind.startswith(f"{shape}, ") and found}
        apart = max(apart, harness.apart([one for found in mine.values() for one in found])) if mine else apart
        if apart > AGREE:
            sys.exit(f"losses differ by {apart:.1e}: not all contenders train the same. {mine}")
    return apart


def published(words: list[str]) -> list[str]:
    """The command line, with PYTHON in place of the interpreters of this machine."""
    return ["PYTHON" if before.endswith("-python") else word for before, word in zip(["", *words], words, strict=False)]


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(measure(args, args.only)))
        return
    target = harness.target(args)
    if not args.redraw:
        runs = collect(args)
        shapes = {
            name: {**asdict(SHAPES[name]), "parameters": training.gpt2_of(SHAPES[name]).num_parameters}
            for name in args.shapes
        }
        result = {
            **harness.head("peers", path=args.nvme_path, script="peers/run.py", arguments=published(sys.argv[1:])),
            "rounds": args.rounds,
            "steps": args.steps,
            "warm_up": WARM_UP,
            "apart": check_losses(args, runs),
            "shapes": shapes,
            "runs": runs,
        }
        harness.write_json(target, result)
    publish(target)


if __name__ == "__main__":
    main()
