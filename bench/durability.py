"""The time that durable states cost a training with everything on NVMe, and how soon a killed run goes on.

    python bench/durability.py                       # shape S: 319 M parameters; about 12 minutes on 2 cores
    python bench/durability.py --layers 4 --rounds 1 --steps 3

Every measurement runs in a process of its own, and the kinds take turns, round by round, since machines are shared:
compare medians and ratios. `durable` commits every step (infinity.durable). Recovery is the construction of a new
engine on a model on the meta device, which fills the slots that are not committed, and then `engine.resume()`. Writes
bench/results/durability.json, then draws durability.md and durability.png from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import training
from infinity.tier_kind import TierKind
from report.page import publish

SAVES = ("without", "durable")
CLIPS = (0.0, 1.0)
KINDS = [f"{save}, clip {clip:g}" for clip in CLIPS for save in SAVES]
"""Without clipping units are updated during backward, with it in the next forward."""
WARM_UP = 3
"""Steps that are not counted: the first two write each slot for the first time, which takes longer."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "durability")
    training.add_shape(parser, hidden=1024, layers=24, heads=16, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process, after 3 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def run(args: argparse.Namespace, save: str, clip: float) -> dict[str, Any]:
    import infinity

    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder:
        args.nvme_path = folder
        config = training.nvme_config(args, clip, durable=save == "durable")
        model, batch = training.make_gpt2(args, "meta", tied=False), training.random_batches(args)
        engine, *_ = infinity.initialize(model=model, config=config)
        taken = []
        before = harness.moved_so_far(engine)
        for number in range(args.steps + WARM_UP):
            if number == WARM_UP:
                before = harness.moved_so_far(engine)
            tokens, targets = batch()
            began = time.perf_counter()
            engine.backward(engine(tokens, targets))
            engine.step(client_state={"step": number + 1})
            taken.append(time.perf_counter() - began)
        moved = harness.moved_so_far(engine) - before
        found: dict[str, Any] = {
            "steps": taken[WARM_UP:],
            "peak_rss": harness.peak_rss(),
            "written": moved.nvme_bytes_written / args.steps,
            "nvme": engine.ledger.tier_bytes()[TierKind.NVME],
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        engine.close()
        if save == "durable":
            records = Path(folder, "run").rglob("*.record-*")
            found["record"] = max(path.stat().st_size for path in records)
            found |= recovery(args, config)
    return found


def recovery(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, float]:
    """Seconds until an engine is constructed, and until it has resumed."""
    import infinity

    model = training.make_gpt2(args, "meta", tied=False)
    began = time.perf_counter()
    engine, *_ = infinity.initialize(model=model, config=config)
    constructed = time.perf_counter()
    assert engine.resume() == {"step": args.steps + WARM_UP}
    resumed = time.perf_counter()
    engine.close()
    return {"construction": constructed - began, "resume": resumed - constructed}


# -- the rounds --------------------------------------------------------------------------------------------------------


def child(kind: str) -> dict[str, Any]:
    return harness.run_child(__file__, [*sys.argv[1:], "--only", kind])


def main() -> None:
    args = arguments()
    if args.only:
        save, _, clip = args.only.partition(", clip ")
        print(json.dumps(run(args, save, float(clip))))
        return
    target = harness.target(args)
    if not args.redraw:
        runs = harness.collect(
            KINDS, args.rounds, child, lambda found: f"{harness.spread(found['steps']).median:.2f} s a step"
        )
        flags = {name: getattr(args, name) for name in (*training.SHAPE, "rounds", "steps")}
        harness.write_json(target, {**harness.head("durability", path=args.nvme_path), "args": flags, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
