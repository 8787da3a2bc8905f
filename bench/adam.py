"""The optimizer step in host memory: G parameters/s and GB/s of every format, against a bare pass and torch.

The bare pass (`infinity._adam.bare`) makes the same reads and writes as the update with one addition each. All
candidates of one format run interleaved, in an order that rotates; medians are reported, and the last column is the
median of the ratios to the bare pass within a round, so that what else the machine does cancels.

    python bench/adam.py                     # 1e6 (in cache on many machines), 1e7, 1e8: 6 GB of memory, 3 minutes
    python bench/adam.py --sizes 1e7 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# torch's threads otherwise spin for a while after each call, on the processors of whoever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from infinity import _adam
from infinity.optim.cpu_adam import AdamHyper, adam_update, split_master

HYPER = AdamHyper(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# Bytes read and written per parameter: gradient, two moments read and written, and the format's own.
BYTES = {
    ("fp32", "fp32"): 28,
    ("fp32", "bf16"): 26,
    ("remainder", "fp32"): 28,
    ("remainder", "bf16"): 26,
    ("master", "fp32"): 30,
    ("master", "bf16"): 28,
}
Run = Callable[[], object]


@dataclass
class Candidate:
    name: str
    bytes_per_parameter: int
    run: Run
    bare: str = ""  # the candidate that is its floor


def native(format: Any, grad_dtype: Any, n: int, isa: str, threads: int) -> list[Candidate]:
    """The update and its bare pass on the same arrays."""
    start, grad = torch.randn(n), torch.rand(n) * 1e-3 + 1e-6
    grad = grad if grad_dtype == "fp32" else grad.bfloat16()
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    param, remainder = (start, None) if format == "fp32" else split_master(start)
    master = {"fp32": None, "remainder": remainder, "master": start}[format]
    arrays = {"param": param, "master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    step = 0

    def bare() -> None:
        given: dict[str, Any] = {name: 0 if x is None else x.data_ptr() for name, x in arrays.items()}
        _adam.bare(**given, n=n, format=format, grad_dtype=grad_dtype, isa=isa, threads=threads)

    def update() -> None:
        nonlocal step
        step += 1
        if isa == "auto":
            adam_update(param, master, grad, exp_avg, exp_avg_sq, HYPER, step, threads=threads)
            return
        given: dict[str, Any] = {name: 0 if x is None else x.data_ptr() for name, x in arrays.items()}
        given |= {"lr": HYPER.lr, "beta1": HYPER.betas[0], "beta2": HYPER.betas[1], "eps": HYPER.eps}
        given |= {"weight_decay": HYPER.weight_decay, "step": step, "decoupled": HYPER.decoupled}
        _adam.adam(**given, n=n, format=format, grad_dtype=grad_dtype, isa=isa, threads=threads)

    label, size = f"{format}, {grad_dtype} gradient", BYTES[format, grad_dtype]
    return [Candidate(f"bare pass: {label}", size, bare), Candidate(label, size, update, f"bare pass: {label}")]


def by_torch(n: int, floor: str) -> list[Candidate]:
    """torch.optim.AdamW, fused and by default, in fp32, 28 bytes if it were one pass."""

    def candidate(name: str, **options: bool) -> Candidate:
        param = torch.nn.Parameter(torch.randn(n))
        param.grad = torch.randn(n)
        optimizer = torch.optim.AdamW([param], HYPER.lr, HYPER.betas, HYPER.eps, HYPER.weight_decay, **options)
        return Candidate(name, 28, optimizer.step, floor)

    return [candidate("torch AdamW, fused", fused=True), candidate("torch AdamW, default")]


def measure(candidates: list[Candidate], repeats: int) -> dict[str, list[float]]:
    """Seconds of each round, candidates taking turns; one round first to touch memory."""
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for turn in range(repeats + 1):
        for k in range(len(candidates)):
            candidate = candidates[(turn + k) % len(candidates)]
            start = time.perf_counter()
            candidate.run()
            if turn > 0:
                seconds[candidate.name].append(time.perf_counter() - start)
    return seconds


def report(n: int, candidates: list[Candidate], seconds: dict[str, list[float]]) -> None:
    for candidate in candidates:
        mine = seconds[candidate.name]
        median = statistics.median(mine)
        ratio = ""
        if candidate.bare:
            floors = seconds[candidate.bare]
            ratio = f"{statistics.median(floor / own for floor, own in zip(floors, mine, strict=True)):.3f}"
        rate, bandwidth = n / median / 1e9, n * candidate.bytes_per_parameter / median / 1e9
        print(f"| {n:.0e} | {candidate.name} | {rate:.2f} | {bandwidth:.1f} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8], help="parameters")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (ten times as many below 1e7)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per processor")
    parser.add_argument("--isa", default="auto", choices=["auto", *_adam.available_isas()])
    args = parser.parse_args()
    threads = args.threads or _adam.default_threads()
    torch.set_num_threads(threads)
    isa = _adam.default_isa() if args.isa == "auto" else args.isa
    print(f"{isa}, {threads} threads, torch {torch.__version__}, medians of {args.repeats} interleaved rounds\n")
    print("| parameters | what | G/s | GB/s | / bare |\n|---|---|---|---|---|")
    for size in args.sizes:
        n = int(size)
        repeats = args.repeats * (10 if n < 10**7 else 1)
        for format, grad_dtype in BYTES:
            candidates = native(format, grad_dtype, n, args.isa, threads)
            if (format, grad_dtype) == ("fp32", "fp32"):
                candidates += by_torch(n, candidates[0].name)
            report(n, candidates, measure(candidates, repeats))


if __name__ == "__main__":
    main()
