"""Train a GPT-2 on text, byte by byte, with parameters and optimizer states in the tiers of the engine's configuration.

Defaults: 10.8 M parameters, every state on NVMe, the source of Python's standard library, about two and a half minutes.
Results are in runs/gpt2. `torchrun --nproc-per-node N bench/pretrain_gpt2.py ...` trains on N ranks.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpt2 import job
from gpt2.duration import JOB_SECONDS, MAX_PASSES, MIN_STEPS, process_seconds, show_seconds
from gpt2.options import BATCH_SIZE, PROMPTS, SAMPLE_BYTES, SHAPE, JobOptions
from gpt2.pretraining import Evaluation
from gpt2_flags import add_shape, positive, shape_of
from infinity.errors import InfinityError

MAX_SAMPLE_BYTES = 1000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse ends the process, with code 2, where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(flag: str, default: Any, text: str, **options: Any) -> None:
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(flag, default=default, help=text + shown, **options)

    add_shape(parser, SHAPE)
    text = f"sequences of a step, all ranks together (default: the config's, or {BATCH_SIZE})"
    add("--batch-size", None, text, type=positive, metavar="N")
    text = "steps in all, including those before a loaded checkpoint (default: total_num_steps of the config's "
    text += (
        f"scheduler, else the loaded checkpoint's, else as many as end the job after about {show_seconds(JOB_SECONDS)}"
    )
    text += f": at least {MIN_STEPS}, at most {MAX_PASSES} passes over the text)"
    add("--train-iters", None, text, type=positive, metavar="N")
    text = "steps between evaluations on held-out text; 0 evaluates at the end only"
    add("--eval-interval", Evaluation.interval, text, type=_count, metavar="N")
    add("--eval-iters", Evaluation.iters, "batches of an evaluation; 0 turns it off", type=_count, metavar="N")
    text = (
        f"bytes to write after each of {len(PROMPTS)} prompts in the end, at most {MAX_SAMPLE_BYTES}; each byte reads "
    )
    text += f"the whole model; 0 turns it off (default: {SAMPLE_BYTES} for the default model, 0 for any other)"
    add("--sample", None, text, type=_sample, metavar="BYTES")
    add("--config", None, "configuration of the engine (default: AdamW, every state on NVMe)", metavar="ENGINE.json")
    add("--data", None, "text to train on (default: source of Python's standard library)", metavar="FILE_OR_DIR")
    add("--save", None, "folder for the checkpoint; 'none' saves nothing (default: OUTPUT/checkpoint)", metavar="DIR")
    text = "folder of the checkpoint to resume from; 'auto': the durable run's last step, else a fresh start"
    add("--load", None, text + " (default: 'auto' for a durable run)", metavar="DIR")
    text = "commit each step to NVME_PATH/run, so that a killed job goes on from the last one; set infinity.durable in "
    parser.add_argument("--durable", action="store_true", help=text + "the file of --config instead")
    add("--seed", JobOptions.seed, "seed of the initial weights and of the order of the text", type=_seed, metavar="N")
    add("--metrics", None, "file for one JSON object per step", metavar="FILE.jsonl")
    add("--nvme-path", None, "folder for states on NVMe, without --config (default: OUTPUT/nvme)", metavar="DIR")
    add("--output", JobOptions.output, "folder for the loss curve and the sample", metavar="DIR")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def _sample(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_SAMPLE_BYTES:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SAMPLE_BYTES}, not {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, not {value}")
    return value


def job_options(args: argparse.Namespace) -> JobOptions:
    """Raises ConfigError if options contradict each other."""
    output = Path(args.output)
    return JobOptions(
        shape=shape_of(args),
        batch_size=args.batch_size,
        train_iters=args.train_iters,
        evaluation=Evaluation(args.eval_interval, args.eval_iters),
        sample=args.sample,
        config=args.config,
        data=args.data,
        save=None if args.save == "none" else Path(args.save or output / "checkpoint"),
        load=args.load,
        durable=args.durable,
        seed=args.seed,
        metrics=args.metrics,
        nvme_path=args.nvme_path,
        output=output,
    )


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] | None = None) -> int:
    """Return the process's exit code: 0, 2 after an error, 130 after Ctrl-C.

    clock: seconds since the job started, monotonic; it starts now by default.
    """
    began = time.monotonic()
    args = parse(arguments)
    try:
        options = job_options(args)
    except InfinityError as error:
        print(f"pretrain_gpt2.py: {error}", file=sys.stderr)
        return 2
    return run(options, clock or (lambda: time.monotonic() - began))


def run(options: JobOptions, clock: Callable[[], float], name: str = "pretrain_gpt2.py") -> int:
    """Run a job and print its error, if it fails, after the script's name. Returns the exit code, as `main` does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun's signal to stop; end as after Ctrl-C
    logging.getLogger("infinity").setLevel(logging.WARNING)  # the job prints these facts itself
    with ExitStack() as stack:  # undone when the exception is gone, since its frames refer to parameters
        try:
            job.run(options, stack, clock)
        except (InfinityError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{name}: stopped; no checkpoint was saved", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(clock=process_seconds))  # the interpreter's start and imports count, too
