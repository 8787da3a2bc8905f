"""Drives give the sum of their bandwidths: `nvme_path` as a list, shown on throttled devices.

    sudo python bench/stripe.py            # about 5 minutes; root, loop devices and the blkio cgroup are needed

Makes three small file systems on loop devices. Two are limited to the same number of bytes a second in each direction
(the blkio controller's throttle, which the kernel enforces), and one to a third of it. Runs the I/O engine on each, on
the two equal ones, and on a fast and the slow one: round robin, and with shares by speed. Training steps of a GPT-2 on
the last two. Writes bench/results/stripe.json, then draws stripe.md from it. Everything else that it made is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import harness
import infinity
from infinity.cli.drive.measure import OPS, Bench, Workload
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.tiers.io import AUTO
from report.page import publish

MB = 1 << 20
EQUAL, BY_SPEED = "round robin", "by speed"
SHAPE = GPT2Config(vocab_size=1024, seq_length=8, num_layers=4, hidden_size=512, num_attention_heads=8)
WARM_UP = 3
"""Steps before the first that is measured: gradients are stored in the first ones."""
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
        throttle(mount, limit)
        yield mount


def throttle(mount: Path, limit: int) -> None:
    number = os.stat(mount).st_dev
    for way in ("read", "write"):
        setting = BLKIO / "infinity-bench" / f"blkio.throttle.{way}_bps_device"
        setting.write_text(f"{os.major(number)}:{os.minor(number)} {limit}")


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


def speeds(folders: dict[str, tuple[list[Path], tuple[int, ...]]], args: argparse.Namespace) -> list[harness.Result]:
    """GB/s of every op. folders: name → folders, and weights of their stripe; by default by speed."""
    samples = []
    work = [Workload(op, MB, 8, 1, AUTO[0]) for op in OPS]
    for number, name in harness.interleaved(folders, args.rounds):
        paths, weights = folders[name]
        with Bench(paths, args.size * MB, work, weights=weights) as bench:
            for workload in work:
                found = bench.run(workload, seconds=args.seconds).gb_per_s
                samples.append({"op": workload.op, "who": name, "round": number, "gb_per_s": found})
                print(f"{name:<12} {bench.weights} {workload.op:<6} {found:.3f} GB/s", file=sys.stderr, flush=True)
    return samples


def steps(folders: list[Path], args: argparse.Namespace) -> list[harness.Result]:
    """Mean seconds of the steps of trainings, with equal shares of the folders and by speed."""
    samples = []
    place = {"device": "nvme", "nvme_path": [str(folder) for folder in folders]}
    for number, (name, shares) in harness.interleaved([(EQUAL, "equal"), (BY_SPEED, "auto")], args.rounds):
        torch.manual_seed(0)
        config = {
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"offload_param": place, "offload_optimizer": place},
            "aio": {"shares": shares},
        }
        with infinity.initialize(model=GPT2(SHAPE), config=config)[0] as engine:
            io = engine.parts.plan.io
            assert io is not None
            tokens = torch.randint(SHAPE.vocab_size, (1, SHAPE.seq_length))
            begin = 0.0
            for step in range(WARM_UP + args.steps):
                if step == WARM_UP:
                    engine.settle()
                    begin = time.perf_counter()
                loss = engine(tokens, tokens)
                engine.backward(loss)
                engine.step()
            engine.settle()  # updates of the last step
            seconds = (time.perf_counter() - begin) / args.steps
            sample = {"who": name, "round": number, "seconds": seconds, "loss": loss.item()}
            samples.append(sample | {"weights": list(io.stripe.weights)})
            print(f"{name:<12} {io.stripe.weights} step {seconds:.2f} s", file=sys.stderr, flush=True)
    return samples


def measure(args: argparse.Namespace) -> harness.Result:
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=args.path)))
        undo.enter_context(own_group())
        room, limit = (args.size + 64) * MB, args.limit * 10**6
        limits = {"a": limit, "b": limit, "slow": limit // args.ratio}
        a, b, slow = (undo.enter_context(throttled_device(folder, n, room, most)) for n, most in limits.items())
        folders = {"one": ([a], ()), "the other": ([b], ()), "both": ([a, b], ()), "slow": ([slow], ())}
        unequal = {EQUAL: ([a, slow], (1, 1)), BY_SPEED: ([a, slow], ())}
        found = {"samples": speeds(folders | unequal, args)}
        for device, most in ((a, args.step_limit), (slow, args.step_limit / args.ratio)):
            throttle(device, int(most * 10**6))
        return found | {"steps": steps([a, slow], args)}


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "stripe")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder for the images")
    parser.add_argument("--limit", type=int, default=200, help="MB (10^6) a second of each device and direction")
    parser.add_argument("--ratio", type=int, default=3, help="how many times slower the slow device is")
    parser.add_argument("--step-limit", type=int, default=40, help="--limit during steps, so that drives bound them")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a training")
    parser.add_argument("--size", type=int, default=256, help="MiB that are read and written")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    target = harness.target(args)
    if not args.redraw:
        if os.geteuid() != 0 or not BLKIO.exists():
            sys.exit("root and the blkio cgroup (version 1) are needed to throttle devices")
        note = (
            f"Loop devices limited by the kernel to {args.limit} MB/s in each direction, the slow one to "
            f"{args.limit / args.ratio:.0f}; blocks of 1 MiB, 8 in flight; medians of {args.rounds} runs of "
            f"{args.seconds:g} s, GB/s. Steps run with limits of {args.step_limit} and "
            f"{args.step_limit / args.ratio:.0f} MB/s, so that the drives bound them."
        )
        head = harness.head("stripe", path=args.path, note=note)
        harness.write_json(target, {**head, **measure(args)})
    publish(target)


if __name__ == "__main__":
    main()
