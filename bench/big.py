"""A Llama with 6.7 billion parameters, trained from a drive in 3 GB of memory.

    python bench/big.py --nvme-path /local_nvme           # about 15 minutes on 2 cores; 54 GB of drive at most
    python bench/big.py --layers 2 --limit ""              # a short one, without a limit of memory

Random weights, moments of 8 bits, batch 1, sequence 128, checkpointed blocks, all states on nvme, and buffers to fetch
100 MB ahead (`infinity.prefetch_bytes`). The process runs in a control group with --limit bytes of memory where the
machine allows that. Beside the step stand the two times that bound it: `compute`, the forward and backward of one block
in memory × blocks, and the bytes of a step ÷ the drive's mixed bandwidth, measured before and after each step. Writes
bench/results/big.json, then draws bench/results/big.md and big.png from it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
from infinity.sizes import parse_size
from report.big import WARM_UP
from report.page import publish

if TYPE_CHECKING:
    from torch import nn

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "big")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help=f"counted steps, after {WARM_UP}")
    parser.add_argument("--prefetch", default="100MB", metavar="SIZE", help="infinity.prefetch_bytes")
    parser.add_argument("--limit", default="3GB", metavar="SIZE", help="memory of the control group; empty: no group")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(args: argparse.Namespace, layers: int, device: str) -> nn.Module:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": args.hidden,
        "intermediate_size": 11008 * args.hidden // 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, args.hidden // 128),
        "vocab_size": 32000,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**shape)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


# -- what runs in the process whose memory is limited ------------------------------------------------------------------


def train(args: argparse.Namespace) -> harness.Result:
    import torch

    import infinity

    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "steps_per_print": 0,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"moments": "8bit", "prefetch_bytes": args.prefetch},
    }
    torch.manual_seed(0)
    model = make_model(args, args.layers, "meta")
    began = time.perf_counter()
    engine, *_ = infinity.initialize(model=model, config=config)
    constructed = time.perf_counter() - began
    made = engine.ledger.snapshot()
    tokens = torch.randint(0, 32000, (1, args.sequence))
    steps = []
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            first = harness.moved_so_far(engine)
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        steps.append({"seconds": time.perf_counter() - began, "loss": loss.item()})
        print(f"step {number + 1}: {steps[-1]['seconds']:.1f} s, loss {steps[-1]['loss']:.3f}", flush=True)
        sys.stdin.readline()  # the parent measures the drive
    moved = harness.moved_so_far(engine) - first
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "construction": {"seconds": constructed, "written": made.nvme_bytes_written},
        "steps": steps,
        "read": moved.nvme_bytes_read / args.steps,
        "written": moved.nvme_bytes_written / args.steps,
        "drive": drive_bytes(args.nvme_path),
        "peak_rss": harness.peak_rss(),
        "group": memory_group_peak(),
    }
    engine.close()
    return result


def drive_bytes(folder: str) -> int:
    """Bytes of blocks that this process's open files take in `folder`."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            stat, name = os.stat(link), os.readlink(link)
        except OSError:
            continue
        if name.startswith(str(Path(folder).resolve())):
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def memory_group_peak() -> int | None:
    """Peak of the bytes charged to the control group of this process, its page cache included; None without one."""
    folder = os.environ.get("BIG_GROUP")
    if not folder:
        return None
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((Path(folder) / name).read_text()) for name in names if (Path(folder) / name).exists())


# -- the bounds --------------------------------------------------------------------------------------------------------


def compute_seconds(args: argparse.Namespace) -> float:
    """Seconds of forward and backward in memory: of one block × blocks, plus the rest of the model."""
    import torch

    tokens = torch.randint(0, 32000, (1, args.sequence))
    seconds: dict[int, float] = {}
    for layers in (1, 5):
        model = make_model(args, layers, "cpu").bfloat16()
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            taken.append(time.perf_counter() - began)
            model.zero_grad()
        seconds[layers] = min(taken)
    more: int = args.layers - 1
    return seconds[1] + more * (seconds[5] - seconds[1]) / 4


def drive_rate(args: argparse.Namespace, op: str) -> float:
    """The drive's write or mixed bandwidth in bytes/s, from `infinity aio-bench`."""
    tool = [sys.executable, "-m", "infinity.cli.main", "aio-bench", "--path", args.nvme_path, "--op", op, "--json"]
    done = subprocess.run(tool, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["gb_per_s"]["median"] * 1e9)


# -- the parent --------------------------------------------------------------------------------------------------------


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A control group with `limit` bytes of memory, or None where this process cannot make one."""
    root = next((path for path in MEMORY_GROUPS if (path / "cgroup.procs").exists()), None)
    folder = None if root is None else root / f"infinity-big-{os.getpid()}"
    try:
        if folder is not None:
            folder.mkdir()
            name = "memory.limit_in_bytes" if (folder / "memory.limit_in_bytes").exists() else "memory.max"
            (folder / name).write_text(str(limit))
    except OSError as error:
        warnings.warn(f"no control group, so memory is not limited: {error}", stacklevel=2)
        if folder is not None and folder.exists():
            folder.rmdir()
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            folder.rmdir()


def run_limited(args: argparse.Namespace) -> harness.Result:
    command = [sys.executable, __file__, *sys.argv[1:], "--only"]
    with memory_group(parse_size(args.limit)) if args.limit else no_group() as group:
        before: list[str] = []
        environment = dict(os.environ)
        if group is not None:
            before = ["sh", "-c", f'echo $$ > {shlex.quote(str(group))}/cgroup.procs && exec "$@"', "sh"]
            environment["BIG_GROUP"] = str(group)
        mixed = [drive_rate(args, "mixed")]
        with subprocess.Popen(
            [*before, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            line = ""
            for line in process.stdout:
                if line.startswith("step "):
                    mixed.append(drive_rate(args, "mixed"))
                    print(f"{line.rstrip()}, drive {mixed[-1] / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
                    process.stdin.write("\n")
                    process.stdin.flush()
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with code {process.returncode}; its error is above.")
    return {**json.loads(line), "mixed": mixed}


@contextmanager
def no_group() -> Iterator[None]:
    yield None


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(train(args)))
        return
    target = harness.target(args)
    if not args.redraw:
        bounds = {"write": drive_rate(args, "write"), "compute": compute_seconds(args)}
        shape = {name: getattr(args, name) for name in ("layers", "hidden", "sequence", "limit", "prefetch")}
        head = harness.head("big", path=args.nvme_path)
        harness.write_json(target, {**head, "args": shape, **run_limited(args), **bounds})
    publish(target)


if __name__ == "__main__":
    main()
