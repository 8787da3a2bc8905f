"""Train a GPT-2 whose states exceed the memory of the process that trains it. `make run` runs this.

The process limits its own memory to about 1 GB. A plain PyTorch loop for the model runs under that limit first, and
fails. Infinity then trains the model under the same limit, with every state on NVMe: 101 M parameters in bf16 (in fp32
where the CPU has no bf16), AdamW, the source of Python's standard library as text, about two and a half minutes on two
cores. It computes on the CPU, writes 1.2 GB to the drive in a step, about 70 GB in all, and leaves no file.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import memory_limit
import plain_gpt2
import pretrain_gpt2
from gpt2.data import VOCAB_SIZE
from gpt2.duration import process_seconds
from gpt2.options import JobOptions
from gpt2.pretraining import Evaluation
from gpt2_flags import add_shape, positive, shape_of
from infinity.errors import ConfigError, InfinityError
from infinity.sim.gpt2 import GPT2Config
from infinity.sizes import parse_size, show_bytes, show_count

SHAPE = GPT2Config(vocab_size=VOCAB_SIZE, seq_length=64, num_layers=32, hidden_size=512, num_attention_heads=8)
"""Many layers of moderate width: the engine's buffers hold a few layers, whatever their number."""
BATCH_SIZE = 4
MEMORY = 800_000_000
"""Bytes beyond Python and torch, whose own memory depends on torch's build."""
STATES = "runs/states"
DISK_BYTES = 16
"""Bytes of a parameter on NVMe: in bf16 12 for its states, 2 for its gradient in the first step; in fp32 16."""
NO_LIMIT = resource.RLIM_INFINITY
FAILED = 3
"""Exit code of a plain loop that lacks memory."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse ends the process, with code 2, where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    text = "private memory of the process, for Infinity and for the plain loop, such as 1GB; 'none': no limit "
    text += f"(default: {show_bytes(MEMORY)} beyond what Python and torch take)"
    parser.add_argument("--memory-limit", type=_size, metavar="SIZE", help=text)
    text = "run the plain PyTorch loop only, under the same limit"
    parser.add_argument("--plain", action="store_true", help=text)
    add_shape(parser, SHAPE)
    text = f"sequences of a step (default: {BATCH_SIZE})"
    parser.add_argument("--batch-size", type=positive, default=BATCH_SIZE, metavar="N", help=text)
    text = "steps (default: as many as end the run after about 2:30, and 50 or more)"
    parser.add_argument("--train-iters", type=positive, metavar="N", help=text)
    text = "text to train on (default: source of Python's standard library)"
    parser.add_argument("--data", metavar="FILE_OR_DIR", help=text)
    text = f"folder for states, on a local drive; emptied in the end (default: {STATES})"
    parser.add_argument("--nvme-path", default=STATES, metavar="DIR", help=text)
    parser.add_argument("--metrics", metavar="FILE.jsonl", help="file for one JSON object per step")
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    try:
        return NO_LIMIT if text == "none" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_disk(folder: Path, shape: GPT2Config) -> None:
    """Raise ConfigError if the drive of `folder`, which need not exist yet, is too small for the states."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(existing).free, DISK_BYTES * shape.num_parameters
    if free < needed:
        raise ConfigError(
            f"The states take {show_bytes(needed)} in {folder}, and its drive has {show_bytes(free)} free. "
            "Name a folder on another drive with --nvme-path, or train a smaller model with --num-layers."
        )


def describe(args: argparse.Namespace, process: int) -> plain_gpt2.Need:
    """Print the limit and the plain loop's need beside it. process: bytes of Python and torch. Returns the need."""
    shape = shape_of(args)
    need = plain_gpt2.need_of(shape, args.batch_size, process)
    parameters = show_count(shape.num_parameters)
    print(f"model: GPT-2 with {parameters} parameters, {args.batch_size} x {shape.seq_length} tokens a step")
    print(f"a plain PyTorch loop needs {show_bytes(need.total)}:")
    states = f"parameters, gradients and AdamW's moments in fp32, {plain_gpt2.STATE_BYTES} bytes a parameter"
    for count, what in ((need.states, states), (need.activations, "activations"), (process, "Python and torch")):
        print(f"  {show_bytes(count):>7}  {what}")
    if args.memory_limit != NO_LIMIT:
        print(f"memory limit of this process: {show_bytes(args.memory_limit)} (RLIMIT_DATA, private memory)")
    if need.total <= args.memory_limit or args.memory_limit == NO_LIMIT:
        print("The plain loop fits. Give a smaller --memory-limit or a larger model to see it fail.")
    return need


def run_plain(args: argparse.Namespace) -> int:
    """Run the plain loop in this process. Returns its exit code."""
    steps = args.train_iters or 1

    def show(step: int, loss: float) -> None:
        print(f"plain loop: step {step}/{steps}: loss {loss:.3f}", flush=True)

    try:
        plain_gpt2.train(shape_of(args), args.batch_size, steps, args.data, JobOptions.seed, show)
    except plain_gpt2.OutOfMemory as error:
        print(f"plain loop: out of memory in {error}", flush=True)
        return FAILED
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"plain loop: done, peak memory {show_bytes(peak)}")
    return 0


def attempt_plain(arguments: Sequence[str]) -> int:
    """Run one step of the plain loop in a process of its own, with the same arguments. Returns its exit code."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--plain", "--train-iters", "1"]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, FAILED):  # such as a signal: C++ code that does not catch std::bad_alloc
        print(f"plain loop: ended with code {code}")
    return code


def job_options(args: argparse.Namespace, need: plain_gpt2.Need) -> JobOptions:
    """Return the options of Infinity's job, which writes no file but that of --metrics."""
    return JobOptions(
        shape=shape_of(args),
        batch_size=args.batch_size,
        train_iters=args.train_iters,
        evaluation=Evaluation(),
        sample=0,
        data=args.data,
        metrics=args.metrics,
        nvme_path=args.nvme_path,
        output=None,
        plain_bytes=need.total,
    )


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] | None = None) -> int:
    """Return the process's exit code: 0, 2 after an error, 130 after Ctrl-C; with --plain 3 if memory lacks.

    clock: as `pretrain_gpt2.main` takes it.
    """
    began = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    try:
        process = memory_limit.private_bytes()
        if args.memory_limit is None:
            args.memory_limit = process + MEMORY
        if not args.plain:
            check_disk(Path(args.nvme_path), shape_of(args))
            need = describe(args, process)
            sys.stdout.flush()
            attempt_plain(arguments)
        memory_limit.limit_memory(args.memory_limit)
        if args.plain:
            return run_plain(args)
    except (InfinityError, OSError) as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo.py: stopped", file=sys.stderr)
        return 130
    print("Infinity:" if args.memory_limit == NO_LIMIT else "Infinity, under the same limit:", flush=True)
    return pretrain_gpt2.run(job_options(args, need), clock or (lambda: time.monotonic() - began), "demo.py")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read at the first use of CUDA: host memory is what this shows
    sys.exit(main(clock=process_seconds))
