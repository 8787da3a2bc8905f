"""Time and bytes of a training step of adapters on a frozen base on NVMe, in each format of `infinity.frozen`; and the
speed at which a CPU decodes the formats, beside a copy of the decoded bytes.

    python bench/frozen.py                          # shape S: 319 M parameters; about 10 minutes on 2 cores
    python bench/frozen.py --layers 4 --rounds 1 --steps 3

Every linear layer of a GPT-2 has an adapter of rank 8. Every process trains one engine; formats take turns, since
machines are shared. Writes bench/results/frozen.json, then draws frozen.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import harness
import training

FORMATS = ("as_is", "8bit", "nf4")
RANK = 8
WARM_UP = 3
"""Steps that are not counted: the first records the trace."""
DECODED = 16 << 20
"""Bytes of the decoded values of a measured unit."""
PASSES = 60


class Adapter(nn.Module):
    """A frozen linear layer with a trainable update of rank `RANK`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(args: argparse.Namespace) -> nn.Module:
    """Return a frozen GPT-2 with an adapter around each linear layer of its blocks."""
    model = training.make_gpt2(args, "cpu", tied=False).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "." in name.partition(".")[2]:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapter(module))
    return model


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "frozen")
    training.add_shape(parser, hidden=1024, layers=24, heads=16, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each format")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process, after 3 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=FORMATS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, format: str) -> dict[str, Any]:
    import infinity

    config = training.nvme_config(args, 0.0, frozen=format)
    engine = infinity.initialize(model=adapted(args), config=config)[0]
    batch, seconds, first = training.random_batches(args), [], engine.ledger.snapshot()
    for number in range(args.steps + WARM_UP):
        if number == WARM_UP:
            first = harness.moved_so_far(engine)
        began = time.perf_counter()
        engine.backward(engine(*batch()))
        engine.step()
        seconds.append(time.perf_counter() - began)
    moved = harness.moved_so_far(engine) - first
    parameters = list(engine.module.parameters())
    found = {
        "seconds": seconds[WARM_UP:],
        "read": moved.nvme_bytes_read / args.steps,
        "written": moved.nvme_bytes_written / args.steps,
        "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "rates": {} if format == "as_is" else rates(format),
    }
    engine.close()
    return found


def rates(format: str) -> dict[str, float]:
    """Return GB/s of decoded bytes: of decoding in place, of encoding, and of a copy of as many bytes."""
    from infinity.native import _adam
    from infinity.plan.frozen import FrozenCode
    from infinity.tiers import frozen
    from infinity.tiers.memory import host_tensor

    code = FrozenCode(format, torch.bfloat16)  # type: ignore[arg-type]
    weight = torch.randn(DECODED // 2).to(torch.bfloat16)
    stored, _ = frozen.encode(code, weight)
    memory, other = host_tensor(DECODED), host_tensor(DECODED)

    def fastest(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        times = []
        for _ in range(PASSES):
            before()
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return DECODED / min(times) / 1e9

    place = code.stored_in(memory)
    return {
        "decode": fastest(lambda: frozen.decode(code, place, memory), lambda: place.copy_(stored)),
        "encode": fastest(lambda: frozen.encode(code, weight)),
        "copy": fastest(lambda: _adam.copy(memory.data_ptr(), other.data_ptr(), DECODED)),
    }


def show(found: dict[str, Any]) -> str:
    return f"{harness.spread(found['seconds']).median:.2f} s"


def main() -> None:
    training.compare(__file__, arguments(), FORMATS, run, show)


if __name__ == "__main__":
    main()
