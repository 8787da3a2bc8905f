"""Time of a training step with every state on NVMe, with and without clipping, and with and without drafts.

    python bench/drafts.py                          # shape S: 319 M parameters; about 15 minutes on 2 cores
    python bench/drafts.py --layers 4 --rounds 1 --steps 3

A draft is an update during backward although the norm of all gradients is not known (`infinity.speculate`). One limit
is never reached and one always. Every process trains one engine; kinds take turns, since machines are shared. Writes
bench/results/drafts.json, then draws drafts.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import harness
import training

KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "no clipping": (0.0, {}),
    "clipping, never reached": (1e3, {}),
    "clipping, never reached, no drafts": (1e3, {"speculate": False}),
    "clipping, always reached": (1e-3, {}),
    "clipping, always reached, no drafts": (1e-3, {"speculate": False}),
}
"""Gradient clipping and keys of the section `infinity`."""
WARM_UP = 3
"""Steps that are not counted: the first records the trace, and drafts begin with the second."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "drafts")
    training.add_shape(parser, hidden=1024, layers=24, heads=16, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process, after 3 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import infinity

    clip, keys = KINDS[kind]
    config = training.nvme_config(args, clip, **keys)
    engine = infinity.initialize(model=training.make_gpt2(args, "meta", tied=False), config=config)[0]
    batch, steps, first = training.random_batches(args), [], engine.ledger.snapshot()
    for number in range(args.steps + WARM_UP):
        if number == WARM_UP:
            first = harness.moved_so_far(engine)
        began = time.perf_counter()
        loss = engine(*batch())
        forward = time.perf_counter()
        engine.backward(loss)
        engine.step()
        steps.append({"seconds": time.perf_counter() - began, "forward": forward - began})
    moved = harness.moved_so_far(engine) - first
    found = {
        "steps": steps[WARM_UP:],
        "read": moved.nvme_bytes_read / args.steps,
        "written": moved.nvme_bytes_written / args.steps,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "norm": engine.grad_norm,
        "peak_rss": harness.peak_rss(),
    }
    engine.close()
    return found


def show(found: dict[str, Any]) -> str:
    return f"{harness.spread([step['seconds'] for step in found['steps']]).median:.2f} s"


def main() -> None:
    training.compare(__file__, arguments(), KINDS, run, show)


if __name__ == "__main__":
    main()
