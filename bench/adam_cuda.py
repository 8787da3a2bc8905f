"""The optimizer step on a CUDA device: G parameters/s and GB/s of every format, beside a copy on the device.

    python bench/adam_cuda.py                         # 10^8 parameters: 4 GB of the device's memory, less than a minute
    python bench/adam_cuda.py --output adam_cuda.md   # into a file too, and what was measured into adam_cuda.json

A turn is ten calls between two events; each format takes turns with the copy, round by round. Times are medians;
ratios, of GB/s, are medians of the ratios to the copy of the same round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import harness
from adam_cases import CASES, DTYPES, HYPER, TORCH_BYTES, Case
from infinity.optim import cuda_adam
from infinity.optim.moments import zero_moments
from infinity.rules import RULES, Hyper
from report.adam_cuda import tables
from report.page import publish

CALLS = 10


@dataclass(frozen=True)
class Candidate:
    """bytes: read and written for each parameter."""

    name: str
    bytes: float
    run: Callable[[], object]


def updates(case: Case, n: int, device: str) -> list[Candidate]:
    constants = HYPER | {"betas": (HYPER["beta1"], HYPER["beta2"])}
    hyper = Hyper(case.rule, **{name: constants[name] for name in RULES[case.rule].keys})
    param = torch.zeros(n, dtype=DTYPES[case.gradient], device=device)
    kept = {"fp32": None, "remainder": torch.int16}.get(case.format, torch.float32)
    master = None if kept is None else torch.zeros(n, dtype=kept, device=device)
    grad = torch.randn(n, device=device).mul_(1e-3).to(DTYPES[case.gradient])
    states, scales = zero_moments(case.rule, n, case.moments)
    states, scales = [state.to(device) for state in states], [scale.to(device) for scale in scales]
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        cuda_adam.update_flat(param, master, grad, states, scales, hyper, step, key=step)

    return [Candidate(case.name, case.bytes(), run)]


def others(n: int, device: str) -> list[Candidate]:
    """Return the other passes over a unit's arrays, and torch's optimizer in fp32."""
    values = torch.randn(n, device=device)
    halves = cuda_adam.split_master(values)
    back = torch.empty_like(values)
    param = torch.nn.Parameter(torch.zeros(n, device=device))
    param.grad = values
    optimizer: Any = torch.optim.AdamW([param], lr=1e-4, fused=True)
    return [
        Candidate("sum of squares, fp32", 4, lambda: cuda_adam.sum_of_squares(values)),
        Candidate("sum of squares, bf16", 2, lambda: cuda_adam.sum_of_squares(halves[0])),
        Candidate("split", 8, lambda: cuda_adam.split_master(values, halves)),
        Candidate("join", 8, lambda: cuda_adam.join_master(*halves, back)),
        Candidate("torch's fused AdamW, fp32", TORCH_BYTES, optimizer.step),
    ]


def copy(n: int, device: str) -> Candidate:
    here, there = torch.zeros(4 * n, device=device), torch.empty(4 * n, device=device)
    return Candidate("copy", 32, lambda: there.copy_(here))


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call, timed by CUDA events."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(CALLS):
        run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / CALLS


def measure(candidates: list[Candidate], repeats: int) -> list[harness.Result]:
    """Seconds of a call of each candidate, in the order of rounds. One round first, to load kernels.

    The first candidate is the copy; `copy` holds its seconds in the same rounds.
    """
    times: dict[int, list[float]] = {k: [] for k in range(len(candidates))}
    for number, k in harness.interleaved(times, repeats, warm_up=1):
        taken = seconds(candidates[k].run)
        if number >= 0:
            times[k].append(taken)
    return [
        {"name": one.name, "bytes": one.bytes, "seconds": times[k], "copy": times[0]}
        for k, one in enumerate(candidates)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1e8, help="parameters (1e8)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (7)")
    parser.add_argument("--output", type=Path, help="a file for the table; its JSON stands beside it")
    args = parser.parse_args()
    if reason := cuda_adam.why_not():
        raise SystemExit(f"there is nothing to measure: {reason}")
    n, device = int(args.size), "cuda"
    result = {**harness.head("adam_cuda"), "device": torch.cuda.get_device_name(), "n": n, "samples": []}
    made: list[Callable[[], list[Candidate]]] = [*(partial(updates, case, n, device) for case in CASES)]
    made.append(partial(others, n, device))
    for make in made:  # one at a time beside the copy, so that memory is for one
        found = measure([copy(n, device), *make()], args.repeats)
        result["samples"] += found[1:] if result["samples"] else found
    if args.output is None:
        print(tables(result))
        return
    harness.write_json(args.output.with_suffix(".json"), result)
    publish(args.output.with_suffix(".json"))


if __name__ == "__main__":
    main()
