"""The time that `aio.checksum` costs a step with every state on NVMe.

    python bench/checksums.py                       # shape S: 319 M parameters; about 10 minutes on 2 cores
    python bench/checksums.py --layers 4 --rounds 1 --steps 4

Each process holds two engines of the same model, one with checksums. They take turns, step by step, so that a change
of the machine meets both: a pair of steps gives a ratio. Writes bench/results/checksums.json, then draws checksums.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import harness
import training

KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "fp32 moments": (0.0, {}),
    "8-bit moments": (0.0, {"moments": "8bit"}),
    "fp32 moments, clipping": (1.0, {}),
}
"""Gradient clipping and keys of the section `infinity`."""
WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "checksums")
    training.add_shape(parser, hidden=1024, layers=24, heads=16, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=8, help="counted pairs of steps, after 2 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import infinity

    clip, keys = KINDS[kind]
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder, ExitStack() as stack:
        args.nvme_path = folder
        engines, batches = [], []
        for checksum in (False, True):
            config = training.nvme_config(args, clip, **keys) | {"aio": {"checksum": checksum}}
            engine = infinity.initialize(model=training.make_gpt2(args, "meta", tied=False), config=config)[0]
            engines.append(stack.enter_context(engine))
            batches.append(training.random_batches(args))
        pairs: list[list[tuple[float, float]]] = []
        for number in range(args.steps + WARM_UP):
            pair = [(0.0, 0.0)] * 2
            for place in (0, 1) if number % 2 else (1, 0):
                pair[place] = step(engines[place], batches[place]())
            pairs.append(pair)
        moved = [harness.moved_so_far(engine) for engine in engines]
        steps = args.steps + WARM_UP
        return {
            "seconds": [[seconds for seconds, _ in pair] for pair in pairs[WARM_UP:]],
            "cpu": [[cpu for _, cpu in pair] for pair in pairs[WARM_UP:]],
            "moved": (moved[1].nvme_bytes_read + moved[1].nvme_bytes_written) / steps,
            "parameters": sum(p.numel() for p in engines[0].module.parameters()),
        }


def step(engine: Any, batch: tuple[Any, Any]) -> tuple[float, float]:
    """Return a step's seconds of wall time, and of all processors."""
    began, cpu = time.perf_counter(), time.process_time()
    engine.backward(engine(*batch))
    engine.step()
    if not engine.config.gradient_clipping:
        engine.settle()  # ends updates that would go on beside the other engine's step
    return time.perf_counter() - began, time.process_time() - cpu


def show(found: dict[str, Any]) -> str:
    without, checked = map(list, zip(*found["seconds"], strict=True))
    return f"{harness.spread(without).median:.2f} s, with checksums {harness.spread(checked).median:.2f} s"


def main() -> None:
    training.compare(__file__, arguments(), KINDS, run, show)


if __name__ == "__main__":
    main()
