"""Time of a draft in memory, which reads one slot of the states and writes the other, beside an update in place.

    python bench/draft_kernel.py                    # half a minute

Both update the same bf16 parameters with a remainder by AdamW, in turns; so does an update in place after a copy of all
states. Writes bench/results/draft_kernel.json, then draws draft_kernel.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import harness
from infinity.native import _adam
from infinity.optim.cpu_adam import Arrays, update_flat
from infinity.plan.formats import moments_in, state_format
from infinity.rules import Hyper, MomentFormat
from infinity.tiers.memory import host_tensor
from report.page import publish

FORMATS: tuple[MomentFormat, ...] = ("fp32", "bf16", "8bit")
HYPER = Hyper("adamw", lr=1e-3)


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "draft_kernel")
    parser.add_argument("--parameters", type=float, default=4e7)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=_adam.default_threads(), help="one per processor by default")
    return parser.parse_args()


def arrays(n: int, moments: MomentFormat) -> Arrays:
    """Return zeroed parameters and states as tiers hold them."""
    states = state_format(torch.bfloat16, "remainder", HYPER.rule, moments)
    memory, param = host_tensor(states.nbytes(n)), host_tensor(2 * n)
    memory.zero_()
    views = {name: place.of(memory) for name, place in states.ranges(n).items()}
    return param.zero_().view(torch.bfloat16), views["remainder"], *moments_in(HYPER.rule, views)


def measure(args: argparse.Namespace, moments: MomentFormat) -> dict[str, list[float]]:
    n = int(args.parameters)
    present, spare = arrays(n, moments), arrays(n, moments)
    grad = torch.randn(n).bfloat16()

    def update(target: Arrays, sources: Arrays | None = None) -> None:
        param, master, moments_of, scales = target
        update_flat(param, master, grad, moments_of, scales, HYPER, 3, key=1, threads=args.threads, sources=sources)

    def copied() -> None:
        for target, source in zip(_tensors(spare), _tensors(present), strict=True):
            target.copy_(source)
        update(spare)

    kinds: dict[str, Callable[[], None]] = {
        "in place": lambda: update(present),
        "draft": lambda: update(spare, present),
        "copy, then in place": copied,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds + 1):
        for kind, run in kinds.items():
            began = time.perf_counter()
            run()
            seconds[kind].append(time.perf_counter() - began)
    return {kind: each[1:] for kind, each in seconds.items()}  # the first round touches the memory


def _tensors(given: Arrays) -> list[torch.Tensor]:
    param, master, moments, scales = given
    assert master is not None
    return [param, master, *moments, *scales]


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if not args.redraw:
        torch.set_num_threads(args.threads)
        runs: dict[str, Any] = {moments: measure(args, moments) for moments in FORMATS}
        flags = {name: getattr(args, name) for name in ("parameters", "rounds", "threads")}
        harness.write_json(target, {**harness.head("draft_kernel"), "args": flags, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
