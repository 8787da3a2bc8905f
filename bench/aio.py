"""File I/O of infinity's engine beside fio's, on one laid-out file, and the cost of its parts.

    python bench/aio.py --path /local_nvme                     # about 25 minutes; needs fio (Debian: apt install fio)
    python bench/aio.py --path /local_nvme --rounds 1 --seconds 1 --points 1m

Overwriting a laid-out file, as training does. Each point (block size, queue depth) is run by fio (libaio, io_uring,
and io_uring with registered buffers) and by ours (libaio, io_uring), one process each, in turn, round by round, in an
order that rotates: compare medians. All use O_DIRECT, the same file, buffers allocated once in huge pages (glibc's
malloc.hugetlb for fio), and run for the same time. `tiles` is the update's own pattern: 10 MiB requests, reads and
writes in flight together, with the engine's default block size and depth; it stands beside fio's mixed runs. CPU is
that of the whole process, kernel included. `checksum` is ours with `aio.checksum`. Writes bench/results/aio.json, then
draws aio.md and aio.png from it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import harness
from report.page import publish

MB = 1 << 20
POINTS = {"128k": (128 << 10, 32), "1m": (MB, 32), "8m": (8 * MB, 8)}
"""Block size in bytes, queue depth."""
OPS = ("read", "write", "mixed")
FIO = {
    "fio libaio": ["--ioengine=libaio"],
    "fio io_uring": ["--ioengine=io_uring"],
    "fio io_uring, registered": ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"],
}
OURS = {"ours libaio": "libaio", "ours io_uring": "io_uring"}
TILE = 10 * MB
REQUEST = 16 * MB


@dataclass(frozen=True)
class Work:
    """Work of one run. Sizes are in bytes; `seconds` is its duration."""

    file: str
    size: int
    op: str
    block: int
    depth: int
    seconds: float
    request: int = REQUEST
    checksum: bool = False


Run = Callable[[Work], harness.Result]


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "aio")
    parser.add_argument("--path", default=".", help="folder on the drive to measure")
    parser.add_argument("--size", type=int, default=2 << 30, help="bytes of the file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--ours", help=argparse.SUPPRESS)  # one run of ours, as JSON: what a process of its own does
    return parser.parse_args()


# -- one run -----------------------------------------------------------------------------------------------------------


def run_fio(flags: list[str], work: Work) -> harness.Result:
    command = ["fio", "--name=x", f"--filename={work.file}", f"--size={work.size}", "--direct=1", *flags]
    command += [f"--rw={'rw' if work.op == 'mixed' else work.op}", f"--bs={work.block}", f"--iodepth={work.depth}"]
    command += ["--time_based", f"--runtime={work.seconds}s", "--overwrite=1", "--fallocate=none", "--thread"]
    command += ["--mem=malloc", "--output-format=json"]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    spent = job["job_runtime"] / 1e3
    gb = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
    return {"gb_per_s": gb / spent, "cpu_s_per_gb": (job["usr_cpu"] + job["sys_cpu"]) / 100 * spent / gb}


def run_ours(engine_name: str, work: Work) -> harness.Result:
    """In this process: requests over the whole file, around and around, the queue always full."""
    from infinity.native import _aio
    from infinity.tiers.io import open_engine
    from infinity.tiers.memory import host_tensor

    request = work.request
    flight = max(4, -(-2 * work.block * work.depth // request))
    size = work.size // (2 * request) * 2 * request
    memory = host_tensor(request * flight)
    memory.fill_(0x5A)
    buffered, direct = os.open(work.file, os.O_RDWR), os.open(work.file, os.O_RDWR | os.O_DIRECT)
    file = _aio.File(direct, buffered, work.file)
    if work.checksum:
        file.keep_checksums(size, 64 << 10)
    with open_engine(engine_name, block_size=work.block, queue_depth=work.depth, threads=1) as engine:
        engine.register(memory.data_ptr(), memory.numel())
        if work.checksum:  # reads of blocks that were never written are not verified
            for offset in range(0, size, request):
                engine.write(file, offset, memory.data_ptr(), request).wait()
        under_way: deque[_aio.Request] = deque()
        places = requests(work.op, size, request)
        before = engine.bytes_read + engine.bytes_written
        began, cpu = time.perf_counter(), time.process_time()
        slot = 0
        while time.perf_counter() - began < work.seconds:
            if len(under_way) == flight:
                under_way.popleft().wait()
            write, offset = next(places)
            start = engine.write if write else engine.read
            under_way.append(start(file, offset, memory.data_ptr() + slot * request, request))
            slot = (slot + 1) % flight
        for one in under_way:
            one.wait()
        spent, cpu = time.perf_counter() - began, time.process_time() - cpu
        gb = (engine.bytes_read + engine.bytes_written - before) / 1e9
    return {"gb_per_s": gb / spent, "cpu_s_per_gb": cpu / gb}


def requests(op: str, size: int, request: int) -> Iterator[tuple[bool, int]]:
    """(is a write, offset); mixed reads one half of the file and writes the other, by turns."""
    if op != "mixed":
        while True:
            yield from ((op == "write", offset) for offset in range(0, size, request))
    half = size // 2
    while True:
        for offset in range(0, half, request):
            yield False, offset
            yield True, half + offset


def spawn_ours(engine_name: str, work: Work) -> harness.Result:
    return harness.run_child(__file__, ["--ours", json.dumps([engine_name, asdict(work)])])


# -- all of them -------------------------------------------------------------------------------------------------------


def lay_out(file: Path, size: int) -> None:
    """Content that no layer can compress or take for a hole."""
    with file.open("wb") as out:
        block = os.urandom(16 * MB)
        for _ in range(size // len(block)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


def runners() -> dict[str, Run]:
    """fio's engines and ours, by name."""
    found: dict[str, Run] = {name: partial(run_fio, flags) for name, flags in FIO.items()}
    return found | {name: partial(spawn_ours, engine) for name, engine in OURS.items()}


def points(args: argparse.Namespace, file: Path) -> Iterator[tuple[str, dict[str, tuple[Run, Work]]]]:
    """(point, what takes turns there), the tiles last."""
    known = runners()
    for point in args.points:
        block, depth = POINTS[point]
        for op in OPS:
            work = Work(str(file), args.size, op, block, depth, args.seconds)
            yield point, {name: (run, work) for name, run in known.items()}
    plain = Work(str(file), args.size, "mixed", MB, 32, args.seconds)
    tiles = Work(**{**asdict(plain), "request": TILE})
    checked = Work(**{**asdict(tiles), "checksum": True})
    found = {f"{name}, tiles": (known[name], tiles) for name in OURS}
    found["ours io_uring, tiles, checksum"] = known["ours io_uring"], checked
    yield "tiles", found | {name: (known[name], plain) for name in FIO}


def measure(args: argparse.Namespace, file: Path) -> list[harness.Result]:
    """Every run of every point in every round: a round covers all points, so that none has a quiet hour for itself."""
    samples = []
    todo = list(points(args, file))
    for number in range(args.rounds):
        for point, kinds in todo:
            for name in harness.rotated(list(kinds), number):
                run, work = kinds[name]
                got = run(work)
                samples.append({"point": point, "op": work.op, "who": name, **got})
                print(
                    f"round {number + 1}: {point:>5} {work.op:<6} {name:<32} {got['gb_per_s']:6.2f} GB/s "
                    f"{got['cpu_s_per_gb']:.4f} CPU s/GB",
                    file=sys.stderr,
                    flush=True,
                )
    return samples


def note(args: argparse.Namespace) -> str:
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"{version}; file of {args.size / 2**30:g} GiB; {args.rounds} rounds of runs of {args.seconds:g} s, kinds "
        "interleaved; buffers in huge pages on both sides."
    )


def main() -> None:
    args = arguments()
    if args.ours:
        engine_name, work = json.loads(args.ours)
        print(json.dumps(run_ours(engine_name, Work(**work))))
        return
    target = harness.target(args)
    if not args.redraw:
        if not shutil.which("fio"):
            sys.exit("fio is missing: apt install fio")
        file = Path(args.path) / f"infinity-aio-bench-{os.getpid()}"
        try:
            lay_out(file, args.size)
            samples = measure(args, file)
        finally:
            file.unlink(missing_ok=True)
        harness.write_json(target, {**harness.head("aio", path=args.path, note=note(args)), "samples": samples})
    publish(target)


if __name__ == "__main__":
    main()
