"""The optimizer step in host memory: G parameters/s and GB/s of every format, beside a bare pass and torch.

    python bench/adam.py                              # 1e6, 1e7, 1e8 parameters: 9 GB of memory, about 5 minutes
    python bench/adam.py --isa avx2                   # the page adam_avx2: torch's kernels use AVX2, too
    python bench/adam.py --sizes 1e6 --repeats 3      # a trial; --name keeps it apart

The bare pass (`infinity.native._adam.bare`) goes over as many streams of the same sizes, with one addition for each
word: the time that memory sets. `today` is what an engine without such kernels does with bf16 gradients and parameters:
convert the gradient to fp32, torch's fused AdamW in fp32, cast the parameter to bf16, three passes of 40 bytes. All of
a case take turns, round by round, in an order that rotates, each in arrays of its own in huge pages; a turn is several
calls where n is small, so that each finds its arrays as it left them. Times are medians, ratios are medians of the
ratios within a round, so that what else the machine does cancels. CPUAdam and torch's fused AdamW take turns in tensors
that torch allocates; their processor time leaves out the time in which other processes ran. Writes
bench/results/adam.json, then draws adam.md and adam.png from it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

# torch's threads otherwise spin for a while after each call, on the processors of whoever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "--isa" in sys.argv:  # read when torch is imported
    os.environ.setdefault("ATEN_CPU_CAPABILITY", sys.argv[sys.argv.index("--isa") + 1].replace("plain", "default"))

import torch

import harness
from adam_cases import CASES, DTYPES, HYPER, TORCH, Case
from infinity.native import _adam
from infinity.optim import CPUAdam
from infinity.rules import RULES
from infinity.tiers.memory import host_tensor
from report.page import load, publish

BETAS = HYPER["beta1"], HYPER["beta2"]
PER_TURN = 10**7  # parameters that a turn goes over at least, in one call or several
Run = Callable[[], object]


# -- what is measured --------------------------------------------------------------------------------------------------


def allocate(case: Case, n: int) -> dict[str, torch.Tensor]:
    """Zeroed arrays, uint8; rounded up, so that a scale is never short of its last block."""
    arrays = {name: host_tensor(int(size * n) + 64) for name, (size, _) in case.streams().items()}
    for array in arrays.values():
        array.zero_()
    return arrays


def update(case: Case, n: int, isa: str, threads: int) -> Run:
    arrays = allocate(case, n)
    arrays["grad"][: n * DTYPES[case.gradient].itemsize].view(DTYPES[case.gradient]).normal_(0, 1e-3)
    count = len(RULES[case.rule].moments)
    given: dict[str, Any] = {name: arrays[name].data_ptr() if name in arrays else 0 for name in ("param", "master")}
    given |= {"grad": arrays["grad"].data_ptr(), "moments": [arrays[f"moment{k}"].data_ptr() for k in range(count)]}
    given["scales"] = [arrays[f"scale{k}"].data_ptr() for k in range(count) if f"scale{k}" in arrays]
    given |= {"format": case.format, "grad_dtype": case.gradient, "moment_format": case.moments}
    step = 0

    def run(kept: object = arrays) -> None:
        nonlocal step
        step += 1
        _adam.update(case.rule, n=n, step=step, key=step, isa=isa, threads=threads, **given, **HYPER)

    return run


def bare(case: Case, n: int, threads: int) -> Run:
    arrays = allocate(case, n)
    streams = [(arrays[name].data_ptr(), int(size * n), written) for name, (size, written) in case.streams().items()]

    def run(kept: object = arrays) -> None:
        _adam.bare(streams, threads)

    return run


def fp32_parameter(n: int) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """A parameter of zeros and its gradient."""
    param = torch.nn.Parameter(host_tensor(4 * n).view(torch.float32).zero_())
    param.grad = host_tensor(4 * n).view(torch.float32).normal_(0, 1e-3)
    return param, param.grad


def by_torch(n: int, **options: Any) -> Run:
    """torch.optim.AdamW in fp32: 28 bytes if it were one pass."""
    param, _ = fp32_parameter(n)
    return torch.optim.AdamW([param], HYPER["lr"], BETAS, HYPER["eps"], HYPER["weight_decay"], **options).step


def three_passes(n: int) -> Run:
    """Read 2 and write 4, read 16 and write 12, read 4 and write 2 bytes of each parameter."""
    gradient = host_tensor(2 * n).view(torch.bfloat16).normal_(0, 1e-3)
    low = host_tensor(2 * n).view(torch.bfloat16).zero_()
    param, grad = fp32_parameter(n)
    optimizer = torch.optim.AdamW([param], HYPER["lr"], BETAS, HYPER["eps"], HYPER["weight_decay"], fused=True)

    def run() -> None:
        grad.copy_(gradient)
        optimizer.step()
        low.copy_(param.detach())

    return run


def measure(n: int, args: argparse.Namespace) -> list[harness.Result]:
    """Seconds of one call, of every candidate in every round. One round first, to touch memory."""
    samples = []
    passes = three_passes(n)
    for case in CASES:
        runs = {"update": update(case, n, args.isa, args.threads), "bare": bare(case, n, args.threads), "today": passes}
        if case == CASES[0]:
            runs |= {TORCH[0]: by_torch(n, fused=True), TORCH[1]: by_torch(n)}
        for number, what in harness.interleaved(runs, args.repeats, warm_up=1):
            taken = seconds(runs[what], calls=-(-PER_TURN // n))
            if number >= 0:
                samples.append({"n": n, "case": case.name, "what": what, "round": number, "seconds": taken})
        print(f"{n:.0e} {case.name}", file=sys.stderr, flush=True)
    return samples


def tensors_of(kind: str, n: int) -> list[torch.nn.Parameter]:
    """About n fp32 parameters in memory of torch, with gradients: one tensor, or the blocks of a GPT-2 512 wide."""
    block = [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), *[(512,)] * 5]
    shapes = [(n,)] if kind == "one tensor" else block * max(1, round(n / 3_152_384))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def measure_optimizers(args: argparse.Namespace) -> list[harness.Result]:
    """Seconds and processor time of a step of CPUAdam and of torch's fused AdamW."""
    samples = []
    options: dict[str, Any] = {"lr": HYPER["lr"], "betas": BETAS, "eps": HYPER["eps"], "weight_decay": 0.1}
    for kind in ("one tensor", "blocks of a GPT-2"):
        ours, theirs = tensors_of(kind, int(args.parameters)), tensors_of(kind, int(args.parameters))
        count = {"tensors": f"{kind}, {len(ours)}", "n": sum(map(torch.Tensor.numel, ours))}
        for threads in sorted({1, args.threads}):
            torch.set_num_threads(threads)
            runs: dict[str, Run] = {
                "CPUAdam": CPUAdam(ours, threads=threads, **options).step,
                "fused": torch.optim.AdamW(theirs, fused=True, **options).step,
            }
            for number, what in harness.interleaved(runs, args.repeats, warm_up=1):
                began, processor = time.perf_counter(), time.process_time()
                runs[what]()
                taken = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
                if number >= 0:
                    samples.append({**count, "threads": threads, "what": what, "round": number, **taken})
    return samples


def seconds(run: Run, calls: int) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


# -- the command -------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "adam")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8], help="parameters")
    parser.add_argument("--parameters", type=float, default=5e7, help="parameters of an optimizer")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=_adam.default_threads(), help="one per processor by default")
    parser.add_argument("--isa", default="auto", choices=["auto", *_adam.available_isas()])
    parser.add_argument("--remark", help="a sentence about this run, for its page")
    args = parser.parse_args()
    if args.name == "adam" and args.isa not in ("auto", _adam.default_isa()):
        args.name = f"adam_{args.isa}"
    return args


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if args.redraw:
        saved = load(target)
    else:
        torch.set_num_threads(args.threads)
        isa = _adam.default_isa() if args.isa == "auto" else args.isa
        note = f"{isa}, {args.threads} threads, {args.repeats} rounds, arrays in huge pages."
        with mock.patch.object(_adam, "update_all", partial(_adam.update_all, isa=args.isa)):
            optimizers = measure_optimizers(args)
        torch.set_num_threads(args.threads)
        samples = [sample for size in args.sizes for sample in measure(int(size), args)]
        saved = {**harness.head("adam", note=note), "samples": samples, "optimizers": optimizers}
    if args.remark is not None:
        saved["remark"] = args.remark
    harness.write_json(target, saved)
    publish(target)


if __name__ == "__main__":
    main()
