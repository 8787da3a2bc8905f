"""Time and memory of one training step with everything on NVMe, beside a plain in-memory PyTorch loop of the same
model.

    python bench/step.py                       # shape S: 319 M parameters; about 15 minutes on 2 cores
    python bench/step.py --layers 4 --rounds 1 --steps 3
    python bench/step.py --host-memory 4GiB --moments fp32 --name step_4GiB
    python bench/step.py --host-memory 1.5GiB --moments 8bit --name step_1.5GiB
    python bench/step.py --batch 1 --sequence 16 --forward-updates 0.25 --name step_io     # the drive bounds the step

Every measurement runs in a process of its own, since peak memory belongs to a process, and the kinds take turns, round
by round, since machines are shared: compare medians and ratios. `plain` keeps a bf16 model and an fp32 master in
memory and updates with torch's fused AdamW. `bound` is the bytes a step moved over the disk's mixed bandwidth, measured
before and after the steps, in the same process, with the update's own pattern (10 MB reads and writes, both in flight);
with clipping, plus the backward compute, which has nothing to hide the update behind. Writes bench/results/step.json,
then draws bench/results/step.md and step.png from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from typing import Any

import harness
import training
from report.page import publish

MOMENTS = ("fp32", "bf16", "8bit")
CLIPS = (0.0, 1.0)
KINDS = [f"{what}, clip {clip:g}" for clip in CLIPS for what in ("plain", *MOMENTS)]
"""Measurements: the plain loop and Infinity with moments of each format, without and with clipping."""
WARM_UP = 2
"""Steps that are not counted: the first records the trace, the second follows it."""
TILE, TILES = 10 << 20, 200
"""Bytes of the disk's requests, and how many the file has."""


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "step")
    training.add_shape(parser, hidden=1024, layers=24, heads=16, vocab=8192, sequence=128, batch=4)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process, after 2 that warm up")
    parser.add_argument("--host-memory", metavar="SIZE", help="infinity.memory.host: states stay in memory up to SIZE")
    parser.add_argument("--forward-updates", type=float, default=0.0, help="infinity.forward_updates, without clipping")
    parser.add_argument("--moments", choices=MOMENTS, nargs="+", default=MOMENTS, help="formats to measure")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def measured(steps: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    return {"steps": steps[WARM_UP:], "peak_rss": harness.peak_rss(), **more}


def run_plain(args: argparse.Namespace, clip: float) -> dict[str, Any]:
    import torch

    model, batch = training.make_gpt2(args, tied=False), training.random_batches(args)
    masters = training.Masters(model)
    optimizer = torch.optim.AdamW(masters.values, lr=1e-4, weight_decay=0.01, fused=True)
    steps = []
    for _ in range(args.steps + WARM_UP):
        began = time.perf_counter()
        loss = model(*batch())
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        masters.take_gradients()
        if clip:
            torch.nn.utils.clip_grad_norm_(masters.values, clip)
        optimizer.step()
        masters.write_back()
        seconds = time.perf_counter() - began
        steps.append({"seconds": seconds, "forward": forward - began, "backward": backward - forward})
    return measured(steps)


def run_infinity(args: argparse.Namespace, clip: float, moments: str) -> dict[str, Any]:
    import infinity

    rates = disk_rates(args)
    model, batch = training.make_gpt2(args, "meta", tied=False), training.random_batches(args)
    keys: dict[str, Any] = {"moments": moments, "forward_updates": 0.0 if clip else args.forward_updates}
    if args.host_memory:
        keys["memory"] = {"host": args.host_memory}
    engine, *_ = infinity.initialize(model=model, config=training.nvme_config(args, clip, **keys))
    steps: list[dict[str, float]] = []
    before = first = engine.ledger.snapshot()
    for number in range(args.steps + WARM_UP):
        if number == WARM_UP:  # bytes are counted from here
            before = first = harness.moved_so_far(engine)
        began = time.perf_counter()
        loss = engine(*batch())
        forward = time.perf_counter()
        engine.backward(loss)
        backward = time.perf_counter()
        engine.step()
        now = engine.ledger.snapshot()
        moved, before = now - before, now
        steps.append(
            {
                "seconds": time.perf_counter() - began,
                "forward": forward - began,
                "backward": backward - forward,
                "wait": moved.wait_seconds,
                "update": moved.update_seconds,
            }
        )
    moved = harness.moved_so_far(engine) - first
    result = measured(
        steps,
        parameters=sum(p.numel() for p in model.parameters()),
        tier_bytes=engine.ledger.tier_bytes(),
        read=moved.nvme_bytes_read / args.steps,
        written=moved.nvme_bytes_written / args.steps,
    )
    engine.close()
    return result | {"rates": rates + disk_rates(args)}


def disk_rates(args: argparse.Namespace) -> list[float]:
    """Bytes a second, read and written in sum, of 10 MB reads and 10 MB writes, both in flight."""
    from infinity.tiers.files import open_swap_files
    from infinity.tiers.io import open_engine
    from infinity.tiers.memory import host_tensor

    buffers = [host_tensor(TILE) for _ in range(8)]
    engine = open_engine(block_size=1 << 20, queue_depth=32, threads=1)
    with open_swap_files([args.nvme_path], TILE * TILES, name="disk bandwidth") as file:
        for position in range(TILES):  # laid out before it is measured
            engine.write(file.file, position * TILE, buffers[0].data_ptr(), TILE).wait()
        rates = [2 * TILE * TILES / seconds_of_copy(engine, file.file, buffers) for _ in range(3)]
        engine.close()
    return rates


def seconds_of_copy(engine: Any, file: Any, buffers: list[Any]) -> float:
    """Read every tile and write it back: three reads and four writes in flight."""
    began = time.perf_counter()
    reads: deque[Any] = deque()
    writes: deque[Any] = deque()
    for position in range(TILES + 3):
        if len(writes) == 4:
            writes.popleft().wait()
        if position < TILES:
            address = buffers[position % 8].data_ptr()
            reads.append((engine.read(file, position * TILE, address, TILE), position))
        if len(reads) == 3 or (position >= TILES and reads):
            request, read = reads.popleft()
            request.wait()
            writes.append(engine.write(file, read * TILE, buffers[read % 8].data_ptr(), TILE))
    while writes:
        writes.popleft().wait()
    return time.perf_counter() - began


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    what, _, clip = kind.partition(", clip ")
    return run_plain(args, float(clip)) if what == "plain" else run_infinity(args, float(clip), what)


# -- the rounds --------------------------------------------------------------------------------------------------------


def child(kind: str) -> dict[str, Any]:
    return harness.run_child(__file__, [*sys.argv[1:], "--only", kind])


def show(found: dict[str, Any]) -> str:
    line = f"{harness.median(found['steps'], 'seconds'):.2f} s a step"
    if "rates" in found:
        line += f", disk {harness.spread(found['rates']).median / 1e9:.2f} GB/s"
    return line


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(run(args, args.only)))
        return
    target = harness.target(args)
    if not args.redraw:
        wanted = ("plain", *args.moments)
        kinds = [kind for kind in KINDS if kind.split(",")[0] in wanted]
        runs = harness.collect(kinds, args.rounds, child, show)
        shape = {
            name: getattr(args, name) for name in (*training.SHAPE, "rounds", "steps", "host_memory", "forward_updates")
        }
        head = harness.head("step", path=args.nvme_path)
        harness.write_json(target, {**head, "args": shape, "runs": runs})
    publish(target)


if __name__ == "__main__":
    main()
