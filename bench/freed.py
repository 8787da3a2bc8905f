"""Freed blocks of the C library: peak memory and time of steps with them kept, returned, and by the engine's rule.

    python bench/freed.py                       # 98 M parameters with checkpointed blocks; about 15 minutes on 2 cores
    python bench/freed.py --layers 2 --rounds 1 --steps 2

Each run is a process of its own, and kinds are interleaved. Writes bench/results/freed.json, then draws freed.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from typing import Any

import harness
import training

KINDS = ("glibc's defaults", "rule, memory plenty", "rule, memory short")


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "freed")
    training.add_shape(parser, hidden=768, layers=12, heads=12, vocab=8192, sequence=512, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=8, help="steps of a process, the first one included")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import torch

    import infinity
    from infinity.sim.gpt2 import GPT2
    from infinity.tiers import headroom

    replaced: dict[str, Any] = {"available_memory": lambda: 1 << (20 if kind == KINDS[2] else 60)}
    if kind == KINDS[0]:
        replaced |= dict.fromkeys(("return_freed_blocks", "keep_freed_blocks"), lambda: None)
    vars(headroom).update(replaced)
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder:
        args.nvme_path = folder
        with torch.device("meta"):
            model = GPT2(replace(training.config_of(args, tied=False), checkpoint_activations=True))
        batches = training.random_batches(args)
        with infinity.initialize(model=model, config=training.nvme_config(args, 0.0))[0] as engine:
            seconds = []
            for _ in range(args.steps):
                tokens, targets = batches()
                began = time.perf_counter()
                engine.backward(engine(tokens, targets))
                engine.step()
                seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "peak_rss": harness.peak_rss(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def show(found: dict[str, Any]) -> str:
    return f"{harness.spread(found['seconds'][1:]).median:.2f} s, {found['peak_rss'] / 1e6:.0f} MB"


def main() -> None:
    training.compare(__file__, arguments(), KINDS, run, show)


if __name__ == "__main__":
    main()
