"""Measure the construction of a GPT-2 on the meta device: time and memory to make its values and fill their tiers.

    python bench/construction.py
    python bench/construction.py --trees ../before . --kinds nvme:2 nvme:1 cpu:2 nvme:2:2    # two checkouts, in turns

A kind is placement:threads, or placement:threads:ranks on one machine. Each construction runs in processes of its own.
Prints medians: seconds on the clock and of all processors, for `initialize` and for its part that makes and writes
values (`stream_in`), and the largest resident set of a rank. Published in bench/results/construction.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import harness

FIGURES = ("initialize, s", "processors, s", "values, s", "processors of values, s", "peak, GB")


def child(args: argparse.Namespace) -> None:
    """Construct an engine in this process, a rank, and print the figures as JSON."""
    import torch

    import infinity
    import infinity.engine.wiring as wiring_module
    from infinity.sim.gpt2 import GPT2, GPT2Config
    from infinity.tiers.device import CpuDevice

    if args.ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{args.folder}/store", rank=args.rank, world_size=args.ranks
        )
    taken: dict[str, float] = {}
    wiring: Any = wiring_module
    make = wiring.stream_in

    def timed(*given: Any) -> Any:
        with _time(taken, "values, s", "processors of values, s"):
            return make(*given)

    wiring.stream_in = timed
    where = {"device": args.child} if args.child == "cpu" else {"device": "nvme", "nvme_path": args.folder}
    config = {
        "steps_per_print": 0,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "infinity": {"moments": "8bit"},
    }
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT2(GPT2Config(num_layers=args.layers, hidden_size=args.hidden_size, num_attention_heads=16))
    with _time(taken, "initialize, s", "processors, s"):
        engine = infinity.initialize(model=model, config=config, device=CpuDevice())[0]
    taken["peak, GB"] = harness.peak_rss() / 1e9
    print(json.dumps(taken | {"parameters": model.config.num_parameters}), flush=True)
    engine.close()


@contextmanager
def _time(taken: dict[str, float], clock: str, processors: str) -> Iterator[None]:
    begin, used = perf_counter(), sum(os.times()[:2])
    yield
    taken[clock], taken[processors] = perf_counter() - begin, sum(os.times()[:2]) - used


def measure(args: argparse.Namespace, tree: Path, placement: str, threads: int, ranks: int) -> dict[str, float]:
    """Return the figures of one construction: the largest of a time on the clock, sums of processors, over ranks."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", placement, "--folder", folder, "--ranks", str(ranks)]
        command += ["--layers", str(args.layers), "--hidden-size", str(args.hidden_size)]
        running = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            sys.exit("A construction failed: see the traceback above.")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    combine: dict[bool, Callable[..., float]] = {True: sum, False: max}
    return {name: combine[name.startswith("processors")](one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="constructions of each kind and checkout (3)")
    parser.add_argument(
        "--trees", type=Path, nargs="+", default=[Path.cwd()], help="checkouts with built modules (the current folder)"
    )
    parser.add_argument(
        "--kinds", nargs="+", default=["nvme:2", "nvme:1", "cpu:2"], help="nvme:2 nvme:1 cpu:2 by default"
    )
    parser.add_argument("--layers", type=int, default=12, help="blocks of the model (12)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="width of the model (2048)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder for the files of nvme")
    parser.add_argument("--child", choices=("cpu", "nvme"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    taken: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for number in range(args.rounds):
        for kind in args.kinds:
            placement, threads, ranks = (*kind.split(":"), "1")[:3]
            for tree in args.trees[:: 1 if number % 2 else -1]:
                found = measure(args, tree, placement, int(threads), int(ranks))
                taken[kind, str(tree)].append(found)
                print(kind, tree, {name: round(value, 2) for name, value in found.items()}, flush=True)
    print(harness.machine(args.folder), "load", os.getloadavg())
    print("| kind | tree |", *(f"{name} |" for name in FIGURES))
    for (kind, tree_name), rounds in sorted(taken.items()):
        print(f"| {kind} | {tree_name} |", *(f"{median(one[name] for one in rounds):.2f} |" for name in FIGURES))
    return None


if __name__ == "__main__":
    main()
