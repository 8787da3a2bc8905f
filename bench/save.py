"""The time that a checkpoint costs a training with everything on NVMe: in the foreground, in the background, none.

    python bench/save.py                       # 99 M parameters; about 5 minutes on 2 cores

Every measurement runs in a process of its own, since peak memory belongs to a process, and the kinds take turns, round
by round, since machines are shared: compare medians. Each trains `--steps` steps from the moment a checkpoint is asked
for, and then waits for it; `none` trains as many. `stopped` is how long save_checkpoint kept the loop, `whole` when the
checkpoint was whole, `together` the steps and the checkpoint. Writes bench/results/save.json, then draws save.md from
it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import training
from report.page import publish

SAVES = ("none", "foreground", "background")
CLIPS = (0.0, 1.0)
KINDS = [f"{save}, clip {clip:g}" for clip in CLIPS for save in SAVES]
"""Without clipping units are updated during backward, with it in the next forward."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "save")
    training.add_shape(parser, hidden=768, layers=12, heads=12, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, after 2 that warm up")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="folder for the checkpoints")
    parser.add_argument("--before", default="", help="command that each measured process is started with")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def run(args: argparse.Namespace, save: str, clip: float) -> dict[str, Any]:
    import infinity

    model, batch = training.make_gpt2(args, "meta", tied=False), training.random_batches(args)
    engine, *_ = infinity.initialize(model=model, config=training.nvme_config(args, clip))

    def step() -> float:
        tokens, targets = batch()
        began = time.perf_counter()
        engine.backward(engine(tokens, targets))
        engine.step()
        return time.perf_counter() - began

    for _ in range(2):
        step()
    engine.settle()
    before = harness.peak_rss()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        found = train_and_save(engine, step, args.steps, save, directory)
        nbytes = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    engine.close()
    parameters = sum(p.numel() for p in model.parameters())
    peaks = {"peak_rss": harness.peak_rss(), "peak_rss_before": before}
    return {**found, **peaks, "checkpoint_bytes": nbytes, "parameters": parameters}


def train_and_save(engine: Any, step: Any, steps: int, save: str, directory: str) -> dict[str, Any]:
    """Seconds from the moment at which the checkpoint is requested."""
    stopped = whole = 0.0
    began = time.perf_counter()
    if save != "none":
        engine.save_checkpoint(directory, background=save == "background")
        stopped = whole = time.perf_counter() - began
    taken = []
    for _ in range(steps):
        taken.append(step())
        if engine.saving is not None and whole == stopped and engine.saving.done():
            whole = time.perf_counter() - began
    engine.settle()
    if engine.saving is not None:
        engine.saving.wait()
        whole = whole if whole > stopped else time.perf_counter() - began
    return {"stopped": stopped, "whole": whole, "together": time.perf_counter() - began, "steps": taken}


# -- the rounds --------------------------------------------------------------------------------------------------------


def child(kind: str, before: str) -> dict[str, Any]:
    return harness.run_child(__file__, [*sys.argv[1:], "--only", kind], before=shlex.split(before))


def main() -> None:
    args = arguments()
    if args.only:
        save, _, clip = args.only.partition(", clip ")
        print(json.dumps(run(args, save, float(clip))))
        return
    target = harness.target(args)
    if not args.redraw:
        start = partial(child, before=args.before)
        runs = harness.collect(KINDS, args.rounds, start, lambda found: f"{found['together']:.2f} s in all")
        flags = {name: getattr(args, name) for name in (*training.SHAPE, "rounds", "steps")}
        harness.write_json(target, {**harness.head("save", path=args.nvme_path), "args": flags, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
