"""Predictions of `infinity plan` beside real training runs: peak memory, bytes on the drive, seconds of a step.

    python bench/predict.py                                # 28 kinds of runs; about 30 minutes a round on 2 cores
    python bench/predict.py --kinds "small, nvme" --rounds 1 --results /tmp/predict

Four shapes of GPT-2 are trained in four placements, each without a budget and, if there is a slower tier, with
`infinity.memory.host`. `infinity bench-links` measures the machine's bandwidths before each round. Each run is
predicted right after it, with operations timed anew, since a shared machine does not keep its speed. Another run gives
the peak where glibc keeps no large freed blocks, which no prediction counts. Every run and prediction is a process of
its own. Writes bench/results/predict.json, then draws bench/results/predict.md from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import training
from report.page import publish
from training import SHAPES, Shape, gpt2_of

WARM_UP = 3
"""Steps that are not counted: the planner predicts a step that follows the recorded trace."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Environment in which glibc returns large blocks to the system when they are freed, instead of keeping them."""
BUDGET_SHARE = 0.5
"""Part of the bytes of all states that a budget holds, besides the plan's buffers."""

PLACEMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "memory": ("none", "none", {}),
    "optimizer": ("none", "nvme", {}),
    "nvme": ("nvme", "nvme", {}),
    "nvme 8bit": ("nvme", "nvme", {"moments": "8bit"}),
}
"""Name → device of offload_param, of offload_optimizer, keys of `infinity`."""
BUDGETS = ("", "budget")


def all_kinds() -> list[str]:
    """Names of all runs: shape, placement, and "budget" with one. Without a slower tier a budget changes nothing."""
    every = ((shape, place, budget) for shape in SHAPES for place in PLACEMENTS for budget in BUDGETS)
    return [", ".join(filter(None, kind)) for kind in every if kind[1:] != ("memory", "budget")]


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "predict")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=5, help=f"counted steps of each process, after {WARM_UP}")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--kinds", metavar="TEXT", default="", help="only kinds whose names begin with TEXT")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--links", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def config_of(kind: str, nvme_path: str) -> dict[str, Any]:
    """The engine's configuration for a run or a prediction."""
    shape, (param, optimizer, keys), budget = parts_of(kind)
    memory = {"memory": {"host": budget_bytes(shape)}} if budget else {}
    offload = {
        name: {"device": device, "nvme_path": nvme_path} if device == "nvme" else {"device": device}
        for name, device in (("offload_param", param), ("offload_optimizer", optimizer))
    }
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, **offload},
        "infinity": {**keys, **memory},
    }


def parts_of(kind: str) -> tuple[Shape, tuple[str, str, dict[str, Any]], bool]:
    shape, placement, *budget = kind.split(", ")
    return SHAPES[shape], PLACEMENTS[placement], bool(budget)


def budget_bytes(shape: Shape) -> int:
    """Part of 14 bytes a parameter, and the buffers of a few units."""
    block = 12 * shape.hidden**2
    return int(BUDGET_SHARE * 14 * shape.layers * block) + 20 * max(block, shape.vocab * shape.hidden)


def run_engine(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import torch

    import infinity
    from infinity.sim.gpt2 import GPT2

    shape = parts_of(kind)[0]
    with torch.device("meta"):
        model = GPT2(gpt2_of(shape))
    batch = training.random_batches(argparse.Namespace(vocab=shape.vocab, batch=shape.batch, sequence=shape.sequence))
    engine, *_ = infinity.initialize(model=model, config=config_of(kind, args.nvme_path))
    seconds = []
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            first = harness.moved_so_far(engine)
        began = time.perf_counter()
        engine.backward(engine(*batch()))
        engine.step()
        seconds.append(time.perf_counter() - began)
    moved = harness.moved_so_far(engine) - first
    result = {
        "seconds": seconds[WARM_UP:],
        "peak_rss": harness.peak_rss(),
        "read": moved.nvme_bytes_read / args.steps,
        "written": moved.nvme_bytes_written / args.steps,
    }
    engine.close()
    return result


def predict(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The JSON of `infinity plan --this-machine` for a run, with the bandwidths of `args.links`."""
    from infinity.config import Config
    from infinity.sim.gpt2 import gpt2
    from infinity.sim.machine import Links, Machine
    from infinity.sim.measured import MeasuredTimes
    from infinity.sim.planner import predict as plan

    model, config = partial(gpt2, gpt2_of(parts_of(kind)[0])), Config.load(config_of(kind, args.nvme_path))
    links = Links.from_json(args.links, "bench-links")
    return plan(model, config, Machine.here(Path(args.nvme_path)), links, MeasuredTimes()).to_json()


# -- the rounds --------------------------------------------------------------------------------------------------------


def measure_links(nvme_path: str) -> dict[str, Any]:
    """The JSON of `infinity bench-links`."""
    command = [sys.executable, "-m", "infinity.cli.main", "bench-links", "--path", nvme_path, "--json"]
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(predict(args, args.only) if args.links else run_engine(args, args.only)))
        return
    target = harness.target(args)
    if not args.redraw:
        kinds = [kind for kind in all_kinds() if kind.startswith(args.kinds)]
        links: list[dict[str, Any]] = []

        def run(kind: str) -> dict[str, Any]:
            if len(started) % len(kinds) == 0:
                links.append(measure_links(args.nvme_path))
            started.append(kind)
            command = [*sys.argv[1:], "--only", kind]
            result = harness.run_child(__file__, command)
            result["predicted"] = harness.run_child(__file__, [*command, "--links", json.dumps(links[-1])])
            result["peak_returned"] = harness.run_child(__file__, command, environment=RETURNED)["peak_rss"]
            return result

        def show(result: dict[str, Any]) -> str:
            predicted, seconds = result["predicted"]["step"]["seconds"], harness.spread(result["seconds"]).median
            return f"{predicted:.2f} / {seconds:.2f} s a step, {result['peak_rss'] / 1e9:.2f} GB"

        started: list[str] = []
        runs = harness.collect(kinds, args.rounds, run, show)
        head = harness.head("predict", path=args.nvme_path)
        counts = {"rounds": args.rounds, "steps": args.steps}
        harness.write_json(target, {**head, **counts, "links": links, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
