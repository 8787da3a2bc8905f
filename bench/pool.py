"""Measure sums and additions of gradients while Adam updates other arrays: both use the pool of native threads.

    python bench/pool.py
    python bench/pool.py --trees ../before .    # two checkouts with their builds, in turns

One thread updates without a pause, another passes over a gradient from time to time. First with pieces that sleep
instead of computing (pool_pieces.cpp, compiled by g++), which shows the pool's order with more threads than the machine
has processors: milliseconds of a pass, and threads that work on average. Then with kernels: milliseconds of a pass,
those of the processor that the calling thread used, and nanoseconds of all processors for each parameter updated.
Medians. Published in bench/results/pool.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

PASSES = ("sum, 64 MiB", "add, 64 MiB", "sum, 4 MiB", "add, 4 MiB")
FIGURES = ("pass, ms", "its caller's processor, ms", "update, ns a parameter")
MIB = 1 << 20


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_adam", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_update(native: Any, nbytes: int, threads: int) -> tuple[int, Callable[[], None]]:
    """Return the number of parameters, and an update of arrays of `nbytes` altogether."""
    n = nbytes // 14
    param, grad = torch.zeros(n, dtype=torch.bfloat16), torch.full((n,), 0.01, dtype=torch.bfloat16)
    remainder, moments = torch.zeros(n, dtype=torch.int16), [torch.zeros(n) for _ in range(2)]
    arrays = {"param": param, "master": remainder, "grad": grad}

    def update() -> None:
        native.update(
            "adamw",
            **{name: array.data_ptr() for name, array in arrays.items()},
            moments=[each.data_ptr() for each in moments],
            scales=[],
            n=n,
            format="remainder",
            grad_dtype="bf16",
            moment_format="fp32",
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            step=1,
            threads=threads,
        )

    return n, update


def make_pass(native: Any, name: str, threads: int) -> Callable[[], float]:
    what, _, size = name.partition(", ")
    n = int(size.split()[0]) * MIB // 4
    gradient, stored = torch.full((n,), 0.01), torch.zeros(n)
    if what == "sum":
        return lambda: native.sum_of_squares(gradient.data_ptr(), n, "fp32", threads=threads)
    types = {"source_dtype": "fp32", "target_dtype": "fp32"}
    return lambda: native.receive(gradient.data_ptr(), stored.data_ptr(), n, add=True, threads=threads, **types)


def measure(native: Any, name: str, threads: int, args: argparse.Namespace) -> tuple[float, ...]:
    """Return the medians of a pass on the clock and of its caller's processor time, ms, and the processors' time for a
    parameter, ns, over `args.seconds`.
    """
    n, update = make_update(native, args.adam * MIB, threads)
    run, stop, updates = make_pass(native, name, threads), threading.Event(), 0

    def keep_updating() -> None:
        nonlocal updates
        while not stop.is_set():
            update()
            updates += 1

    update()
    run()
    other = threading.Thread(target=keep_updating)
    end, used = time.perf_counter() + args.seconds, time.process_time()
    other.start()
    times, own = [], []
    while time.perf_counter() < end:
        time.sleep(args.pause)
        before = time.perf_counter(), time.thread_time()
        run()
        times.append(time.perf_counter() - before[0])
        own.append(time.thread_time() - before[1])
    stop.set()
    other.join()
    return median(times) * 1e3, median(own) * 1e3, (time.process_time() - used) / (n * updates) * 1e9


def sleeping(tree: Path, folder: Path) -> Callable[[int, int], tuple[float, ...]]:
    """Compile the pool of a checkout. Returns a function of threads and pieces: ms of a pass, working threads."""
    urgent = "kUrgent" if "kUrgent" in (tree / "csrc/adam/thread_pool.h").read_text() else "kNormal"
    program = folder / f"pool_{len(list(folder.iterdir()))}"
    sources = [Path(__file__).with_name("pool_pieces.cpp"), tree / "csrc/adam/thread_pool.cpp"]
    flags = ["-std=c++20", "-O2", "-pthread", f"-DURGENT={urgent}", f"-I{tree / 'csrc'}"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(program)], check=True)

    def run(threads: int, pieces: int) -> tuple[float, ...]:
        command = [str(program), str(threads), str(pieces), "20"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return tuple(map(float, done.stdout.split()))

    return run


def table(figures: Sequence[str], rounds: int, runs: Mapping[str, Sequence[Callable[[], tuple[float, ...]]]]) -> None:
    """Print a row for each name of `runs`, with the medians of each figure for each checkout, in turns."""
    for number, (name, each) in enumerate(runs.items()):
        if not number:
            print(f"\n| | {' | '.join(figure + (' |' * (len(each) - 1)) for figure in figures)} |")
            print("|---" * (1 + len(figures) * len(each)) + "|")
        found = [[run() for run in each] for _ in range(rounds)]
        medians = [median(turn[tree][k] for turn in found) for k in range(len(figures)) for tree in range(len(each))]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in medians)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).parents[1]], help="checkouts")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 16], help="of the pieces that sleep")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="threads of the kernels")
    parser.add_argument("--adam", type=int, default=512, help="MiB of an update")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two passes")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement by kernels")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pools = [sleeping(tree, Path(folder)) for tree in args.trees]
        cases = itertools.product(args.threads, (32, 512))
        runs = {f"{threads} threads, {n} pieces": [partial(run, threads, n) for run in pools] for threads, n in cases}
        table(("pass, ms", "working threads"), args.rounds, runs)
    natives = [load(next((tree / "infinity/native").glob("_adam.*.so"))) for tree in args.trees]
    kernels = itertools.product(PASSES, args.workers)
    found = {
        f"{name}, {n} threads": [partial(measure, native, name, n, args) for native in natives] for name, n in kernels
    }
    table(FIGURES, args.rounds, found)


if __name__ == "__main__":
    main()
