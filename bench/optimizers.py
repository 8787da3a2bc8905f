"""A step by several optimizers with every state on NVMe, beside the same optimizer in a plain loop in memory.

    python bench/optimizers.py                      # 110 M parameters in fp32; about 15 minutes on 2 cores
    python bench/optimizers.py --layers 2 --rounds 1 --steps 2
    python bench/optimizers.py --parts              # Muon's own step: its iteration, and the rest; half a minute

AdamW is updated by native kernels and by torch's own step on whole parameters, the others by their own steps. Every
process trains one model, by an engine or by a plain loop; kinds take turns, since machines are shared. Writes
bench/results/optimizers.json, then draws optimizers.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import training

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, native": ("AdamW", {}),
    "AdamW, torch's step": ("AdamW", {"optimizer": "torch"}),
    "NAdam": ("NAdam", {}),
    "Adafactor": ("Adafactor", {}),
    "Muon and AdamW": ("Muon", {}),
}
"""`optimizer.type`, and keys of the section `infinity`."""
KINDS = [name for kind in ENGINES for name in (kind, f"{kind}: plain loop") if name != "AdamW, native: plain loop"]
WARM_UP = 3
"""Steps that are not counted: the first records the trace."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "optimizers")
    training.add_shape(parser, hidden=768, layers=14, heads=12, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each process, after 3 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--parts", action="store_true", help="print the parts of a step of torch.optim.Muon, no more")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Train by `kind`, and return the seconds of each step, the peak of resident memory and the bytes moved."""
    optimizer, keys = ENGINES[kind.removesuffix(": plain loop")]
    config = training.nvme_config(args, 0.0, **keys)
    config |= {"bf16": {"enabled": False}, "optimizer": {"type": optimizer, "params": {"lr": 1e-4}}}
    if kind.endswith("plain loop"):
        return plain(args, config)
    import infinity

    engine = infinity.initialize(model=training.make_gpt2(args, "meta", tied=False), config=config)[0]

    def step(batch: tuple[Any, ...]) -> None:
        engine.backward(engine(*batch))
        engine.step()

    moved: list[Any] = []
    seconds = timed(args, step, lambda: moved.append(harness.moved_so_far(engine)))
    counted = moved[1] - moved[0]
    found = {
        "seconds": seconds,
        "peak_rss": harness.peak_rss(),
        "read": counted.nvme_bytes_read / args.steps,
        "written": counted.nvme_bytes_written / args.steps,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
    }
    engine.close()
    return found


def plain(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Train by the same optimizers in a plain loop."""
    from infinity.config import Config
    from infinity.engine.torch_optimizers import configured_optimizers

    model = training.make_gpt2(args, tied=False)
    config |= {"infinity": {"optimizer": "torch"}}
    optimizers = configured_optimizers(Config.load(config), model, None)

    def step(batch: tuple[Any, ...]) -> None:
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return {"seconds": timed(args, step, lambda: None), "peak_rss": harness.peak_rss()}


def timed(args: argparse.Namespace, step: Callable[[tuple[Any, ...]], None], count: Callable[[], None]) -> list[float]:
    """Return the seconds of each counted step. count: called before and after them."""
    batch, seconds = training.random_batches(args), []
    for number in range(args.steps + WARM_UP):
        if number == WARM_UP:
            count()
        began = time.perf_counter()
        step(batch())
        seconds.append(time.perf_counter() - began)
    count()
    return seconds[WARM_UP:]


def show(found: dict[str, Any]) -> str:
    return f"{harness.spread(found['seconds']).median:.2f} s, {found['peak_rss'] / 1e9:.2f} GB"


def print_parts() -> None:
    """Print, as rows of a table, the milliseconds of a step of torch.optim.Muon with and without its iteration."""
    import torch
    from torch.optim import _muon

    iteration = _muon._zeropower_via_newtonschulz
    print("| matrix | step, ms | without Newton-Schulz, ms | share |\n|---|---|---|---|")
    for shape in ((768, 768), (768, 3072), (2048, 2048), (4096, 1024)):
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        optimizer = torch.optim.Muon([parameter], lr=0.02)
        found = []
        for part in (iteration, lambda gradient, *_: gradient):
            _muon._zeropower_via_newtonschulz = part
            optimizer.step()
            seconds = []
            for _ in range(9):
                begun = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - begun)
            found.append(1e3 * statistics.median(seconds))
        _muon._zeropower_via_newtonschulz = iteration
        print(f"| {shape[0]} × {shape[1]} | {found[0]:.1f} | {found[1]:.2f} | {found[1] / found[0]:.1%} |")


def main() -> None:
    args = arguments()
    if args.parts:
        print_parts()
        return
    training.compare(__file__, args, KINDS, run, show)


if __name__ == "__main__":
    main()
