"""Two drives give the sum of their bandwidths: `nvme_path` as a list, shown on two throttled devices.

    sudo python bench/stripe.py            # about 40 seconds; root, loop devices and the blkio cgroup are needed

Makes two small file systems on loop devices, each limited to the same number of bytes a second in each direction (the
blkio controller's throttle, which the kernel enforces), and runs the engine on one, on the other and on both. Writes
bench/results/stripe.json, then draws stripe.md from it. Everything else that it made is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
from infinity.cli.drive.measure import OPS, Bench, Workload
from infinity.tiers.io import AUTO
from report.page import publish

MB = 1 << 20
BLKIO = Path("/sys/fs/cgroup/blkio")


@contextlib.contextmanager
def throttled_device(folder: Path, name: str, nbytes: int, limit: int) -> Iterator[Path]:
    """The mount point of a file system on a loop device, limited for this process to `limit` bytes a second each
    way."""
    image, mount = folder / f"{name}.img", folder / name
    mount.mkdir()
    with contextlib.ExitStack() as undo:
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        undo.callback(image.unlink)
        device = run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        undo.callback(run, "losetup", "--detach", device)
        run("mkfs.ext4", "-q", "-F", "-m", "0", device)
        run("mount", device, str(mount))
        undo.callback(run, "umount", str(mount))
        number = os.stat(device).st_rdev
        for way in ("read", "write"):
            setting = BLKIO / "infinity-bench" / f"blkio.throttle.{way}_bps_device"
            setting.write_text(f"{os.major(number)}:{os.minor(number)} {limit}")
        yield mount


@contextlib.contextmanager
def own_group() -> Iterator[None]:
    """This process in a group of its own, whose limits concern nobody else."""
    group = BLKIO / "infinity-bench"
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure(args: argparse.Namespace) -> list[harness.Result]:
    """GB/s of every op on one device, on the other, and on both, in turns."""
    samples = []
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=args.path)))
        undo.enter_context(own_group())
        room = (args.size + 64) * MB
        a, b = (undo.enter_context(throttled_device(folder, n, room, args.limit * 10**6)) for n in "ab")
        folders = {"one": [a], "the other": [b], "both": [a, b]}
        work = [Workload(op, MB, 8, 1, AUTO[0]) for op in OPS]
        for number, name in harness.interleaved(folders, args.rounds):
            with Bench(folders[name], args.size * MB, work) as bench:
                for workload in work:
                    found = bench.run(workload, seconds=args.seconds).gb_per_s
                    samples.append({"op": workload.op, "who": name, "round": number, "gb_per_s": found})
                    print(f"{name:<10} {workload.op:<6} {found:.3f} GB/s", file=sys.stderr, flush=True)
    return samples


def main() -> None:
    parser = harness.make_parser(__doc__, "stripe")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder for the images")
    parser.add_argument("--limit", type=int, default=200, help="MB (10^6) a second of each device and direction")
    parser.add_argument("--size", type=int, default=256, help="MiB that are read and written")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    target = harness.target(args)
    if not args.redraw:
        if os.geteuid() != 0 or not BLKIO.exists():
            sys.exit("root and the blkio cgroup (version 1) are needed to throttle devices")
        note = (
            f"Loop devices limited by the kernel to {args.limit} MB/s in each direction; blocks of 1 MiB, 8 in flight; "
            f"medians of {args.rounds} runs of {args.seconds:g} s, GB/s."
        )
        head = harness.head("stripe", path=args.path, note=note)
        harness.write_json(target, {**head, "samples": measure(args)})
    publish(target)


if __name__ == "__main__":
    main()
