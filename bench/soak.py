"""Hours of steps with states on NVMe: memory, descriptors, threads, pinned bytes and disk stay flat.

    python bench/soak.py --minutes 120                  # 24 minutes of each of the five configurations
    python bench/soak.py --steps 2000 --hidden 64       # as many steps of each
    python bench/soak.py --minutes 10 --kinds fp32

Each configuration trains a small GPT-2 in a process of its own. Every `--cycle` steps it saves a checkpoint in the
background, evaluates while that is written, waits for it and removes it; resources are read at the end of a cycle, at
most `--samples` times, so that all readings are from the same point of a cycle. The growth of a resource is its
Theil-Sen slope over the run without its first quarter, times that part of the run. Writes bench/results/soak.json and
draws soak.md and soak.png; exits with code 1 if something grows by more than its limit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import harness
import training
from report.page import publish
from report.soak import RESOURCES, excesses

ACTIVATIONS = {"device": "nvme", "min_bytes": 1024, "memory_bytes": 1 << 16}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}, "gradient_clipping": 0.0},
    "bf16, 8bit moments, clipping": {"moments": "8bit"},
    "bf16, update in the next forward": {"update": "next_forward", "moments": "bf16", "gradient_clipping": 0.0},
    "bf16, activations on nvme": {"activations": ACTIVATIONS},
    "bf16, durable": {"durable": True},
}
"""Keys of the config, and of its section `infinity`. Clipping to 1 unless it says otherwise."""
EVALUATIONS = 4
"""Batches that are evaluated in a cycle."""
COLUMNS = ("step", "seconds", *RESOURCES)


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "soak")
    training.add_shape(parser, hidden=256, layers=4, heads=4, vocab=1024, sequence=64, batch=2)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=120, help="of all configurations together")
    length.add_argument("--steps", type=int, help="of each configuration, in place of --minutes")
    parser.add_argument("--cycle", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--samples", type=int, default=300, help="most readings of the resources")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="configurations to train")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as it is")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for states and checkpoints")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what is read ------------------------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_reader() -> Callable[[], int]:
    """A function that returns the bytes in use of malloc, which RSS follows with delay; 0 if the C library has none."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = Mallinfo

    def in_use() -> int:
        found = read()
        return int(found.uordblks + found.hblkhd)

    return in_use


def resources(folder: str, heap: Callable[[], int]) -> dict[str, int]:
    """Bytes unless the name says otherwise. folder: of the states' files, which have no name except in durable runs."""
    gc.collect()
    # Python's cache of 4,096 method look-ups keeps names that PyTorch made for one call, and fills in 1,000 steps.
    sys._clear_type_cache()
    time.sleep(0.05)  # the thread that saved ends
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    disk, blocks = os.stat(folder).st_dev, {}
    numbers = os.listdir("/proc/self/fd")
    for number in numbers:
        try:
            file = os.stat(f"/proc/self/fd/{number}")
            is_state = file.st_nlink == 0 or os.readlink(f"/proc/self/fd/{number}").startswith(folder)
        except FileNotFoundError:  # the listing's own
            continue
        if stat.S_ISREG(file.st_mode) and is_state and file.st_dev == disk:
            blocks[file.st_ino] = 512 * file.st_blocks
    return {
        "rss": 1024 * int(status["VmRSS"].split()[0]),
        "heap": heap(),
        "python_objects": sys.getallocatedblocks(),
        "descriptors": len(numbers) - 1,
        "threads": int(status["Threads"]),
        "pinned": 1024 * (int(status["VmPin"].split()[0]) + int(status["VmLck"].split()[0])),
        "disk": sum(blocks.values()),
    }


class Times:
    """A histogram in bins of 1 %, whose memory does not grow with the number of steps."""

    def __init__(self) -> None:
        self._bins = array("Q", [0]) * 2000

    def add(self, seconds: float) -> None:
        place = int(math.log(max(seconds, 1e-6) / 1e-6) / math.log(1.01))
        self._bins[min(place, len(self._bins) - 1)] += 1

    def figures(self) -> dict[str, float]:
        return {"count": sum(self._bins), **{f"p{part:g}": self._quantile(part / 100) for part in (50, 99, 99.9)}}

    def _quantile(self, part: float) -> float:
        below = part * sum(self._bins)
        place = next(place for place, sum_so_far in enumerate(accumulate(self._bins)) if sum_so_far >= below)
        return float(1e-6 * 1.01 ** (place + 0.5))


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def config_of(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    keys = KINDS[kind]
    config = training.nvme_config(args, 1.0, unit_size=1 << 18, cache_bytes=0) | {"steps_per_print": 0}
    for key, value in keys.items():
        (config if key in config else config["infinity"])[key] = value
    return config


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    import torch

    import infinity

    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="infinity-soak-") as folder:
        args.nvme_path = folder
        model, batch = training.make_gpt2(args, "meta", tied=False), training.random_batches(args)
        engine, *_ = infinity.initialize(model=model, config=config_of(args, kind))
        found = soak(args, engine, batch, folder)
        parameters = sum(p.numel() for p in model.parameters())
        engine.close()
    return {**found, "parameters": parameters}


def soak(args: argparse.Namespace, engine: Any, batch: Callable[[], Any], folder: str) -> dict[str, Any]:
    """Train until the steps or the minutes are over; what was read, and how long steps took."""
    calm, beside_save, heap = Times(), Times(), heap_reader()
    began, number, due, progress = time.perf_counter(), 0, 0.0, 0.0
    limit = args.steps or 60 * args.minutes / len(args.kinds)
    readings = array("d", bytes(8 * len(COLUMNS) * (args.samples + 2)))  # takes its memory now
    rows = 0
    while progress < limit:
        saving = engine.save_checkpoint(folder, tag=f"step{number}", background=True)
        for _ in range(args.cycle):
            times = calm if engine.saving.done() else beside_save
            times.add(step(engine, batch))
        evaluate(engine, batch)
        engine.saving.wait()
        shutil.rmtree(saving)
        number += args.cycle
        seconds = time.perf_counter() - began
        progress = number if args.steps else seconds
        if progress >= due:
            row = {"step": number, "seconds": seconds, **resources(folder, heap)}
            for place, name in enumerate(COLUMNS, rows * len(COLUMNS)):
                readings[place] = row[name]
            rows += 1
            due = progress + limit / args.samples
    starts = range(0, rows * len(COLUMNS), len(COLUMNS))
    samples = [dict(zip(COLUMNS, readings[start : start + len(COLUMNS)], strict=True)) for start in starts]
    return {"samples": samples, "calm": calm.figures(), "beside_save": beside_save.figures()}


def step(engine: Any, batch: Callable[[], Any]) -> float:
    began = time.perf_counter()
    engine.backward(engine(*batch()))
    engine.step()
    return time.perf_counter() - began


def evaluate(engine: Any, batch: Callable[[], Any]) -> None:
    import torch

    engine.eval()
    with torch.no_grad():
        for _ in range(EVALUATIONS):
            engine(*batch())
    engine.train()


def child(kind: str) -> dict[str, Any]:
    # Pieces that wait in the C library's caches of each thread count as in use, and the caches fill over the run.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    return harness.run_child(__file__, [*sys.argv[1:], "--only", kind], environment=environment)


def show(found: dict[str, Any]) -> str:
    return f"{found['samples'][-1]['step']:,.0f} steps, {1000 * found['calm']['p50']:.1f} ms a step"


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(run(args, args.only)))
        return
    target = harness.target(args)
    if not args.redraw:
        runs = {kind: found for kind, (found,) in harness.collect(args.kinds, 1, child, show).items()}
        shape = {name: getattr(args, name) for name in (*training.SHAPE, "cycle")}
        harness.write_json(target, {**harness.head("soak", path=args.nvme_path), "args": shape, "runs": runs})
    publish(target)
    if problems := excesses(json.loads(target.read_text())):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
