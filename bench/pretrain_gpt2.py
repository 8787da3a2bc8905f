"""Train a GPT-2 on text, byte by byte, with parameters and optimizer states in the tiers of the engine's configuration.

Defaults: 10.8 M parameters, every state on NVMe, the source of Python's standard library, about two and a half minutes.
Results are in runs/gpt2. `torchrun --nproc-per-node N bench/pretrain_gpt2.py ...` trains on N ranks.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.config import Config, WarmupCosineLR
from infinity.engine.lr import replace_schedule
from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.gpt2.data import VOCAB_SIZE, Corpus, load_corpus
from infinity.gpt2.duration import JOB_SECONDS, MAX_PASSES, MEASURED_STEPS, MIN_STEPS, process_seconds
from infinity.gpt2.meter import MetricsFile, StepRecord
from infinity.gpt2.model import GPT2, GPT2Config
from infinity.gpt2.plots import plot_loss
from infinity.gpt2.pretraining import Evaluation, Pretraining
from infinity.gpt2.progress import Progress
from infinity.gpt2.report import closing_table, output_lines
from infinity.observe.units import show_count, show_seconds

BATCH_SIZE = 8
PROMPTS = ("    def ", "\n\nclass ", "\nimport ")
SAMPLE_BYTES, MAX_SAMPLE_BYTES = 200, 1000
WARMUP_STEPS = MEASURED_STEPS
"""A constant, since the number of all steps is chosen when these are done."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse ends the process, with code 2, where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(flag: str, default: Any, text: str, **options: Any) -> None:
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(flag, default=default, help=text + shown, **options)

    add("--num-layers", 6, "transformer blocks", type=_positive, metavar="N")
    add("--hidden-size", 384, "width of the residual stream", type=_positive, metavar="N")
    add("--num-attention-heads", 6, "attention heads of a block", type=_positive, metavar="N")
    add("--seq-length", 128, "tokens of a sequence", type=_positive, metavar="N")
    add("--vocab-size", VOCAB_SIZE, f"rows of the embedding; bytes use {VOCAB_SIZE}", type=_positive, metavar="N")
    text = f"sequences of a step, all ranks together (default: the config's, or {BATCH_SIZE})"
    add("--batch-size", None, text, type=_positive, metavar="N")
    text = "steps in all, including those before a loaded checkpoint (default: total_num_steps of the config's "
    text += (
        f"scheduler, else the loaded checkpoint's, else as many as end the job after about {show_seconds(JOB_SECONDS)}"
    )
    text += f": at least {MIN_STEPS}, at most {MAX_PASSES} passes over the text)"
    add("--train-iters", None, text, type=_positive, metavar="N")
    text = "steps between evaluations on held-out text; 0 evaluates at the end only"
    add("--eval-interval", Evaluation.interval, text, type=_count, metavar="N")
    add("--eval-iters", Evaluation.iters, "batches of an evaluation; 0 turns it off", type=_count, metavar="N")
    text = (
        f"bytes to write after each of {len(PROMPTS)} prompts in the end, at most {MAX_SAMPLE_BYTES}; each byte reads "
    )
    text += f"the whole model; 0 turns it off (default: {SAMPLE_BYTES} for the default model, 0 for any other)"
    add("--sample", None, text, type=_sample, metavar="BYTES")
    add("--checkpoint-activations", False, "recompute each block in backward", action="store_true")
    add("--untie-embeddings-and-output-weights", False, "give the head its own weight", action="store_true")
    add("--config", None, "configuration of the engine (default: AdamW, every state on NVMe)", metavar="ENGINE.json")
    add("--data", None, "text to train on (default: source of Python's standard library)", metavar="FILE_OR_DIR")
    add("--save", None, "folder for the checkpoint; 'none' saves nothing (default: OUTPUT/checkpoint)", metavar="DIR")
    add("--load", None, "folder of the checkpoint to resume from", metavar="DIR")
    add("--seed", 0, "seed of the initial weights and of the order of the text", type=_seed, metavar="N")
    add("--metrics", None, "file for one JSON object per step", metavar="FILE.jsonl")
    add("--nvme-path", None, "folder for states on NVMe, without --config (default: OUTPUT/nvme)", metavar="DIR")
    add("--output", "runs/gpt2", "folder for the loss curve and the sample", metavar="DIR")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


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


def model_config(args: argparse.Namespace) -> GPT2Config:
    if args.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size is {args.vocab_size}, but a byte has {VOCAB_SIZE} values. Give at least {VOCAB_SIZE}."
        )
    return GPT2Config(
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        checkpoint_activations=args.checkpoint_activations,
    )


def sample_bytes(args: argparse.Namespace) -> int:
    """--sample, or its default: a model that was asked for may be so large that each byte takes minutes to read."""
    if args.sample is not None:
        return int(args.sample)
    default = model_config(parse([]))
    is_default = replace(model_config(args), checkpoint_activations=default.checkpoint_activations) == default
    return SAMPLE_BYTES if is_default and args.config is None else 0


def engine_config(args: argparse.Namespace, nvme_path: Path) -> Config:
    """The file's configuration or the default one, with the batch size of the command line.

    Without --train-iters, the schedule of the default one is right in its warm-up only, until `set_schedule`.
    """
    if args.config is None:
        steps = args.train_iters or MIN_STEPS
        return Config.load(_default_config(args.batch_size or BATCH_SIZE, steps, nvme_path))
    if args.nvme_path is not None:
        raise ConfigError(f"--nvme-path is given with --config. Set nvme_path in {args.config} instead.")
    config = Config.load(args.config)
    batch_size = args.batch_size
    if batch_size is None and config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        batch_size = BATCH_SIZE
    if batch_size is None:
        return config
    if config.train_batch_size not in (None, batch_size):
        raise ConfigError(
            f"--batch-size is {batch_size}, but train_batch_size in {args.config} is {config.train_batch_size}. "
            "Leave one of them out."
        )
    return config.model_copy(update={"train_batch_size": batch_size})


def _default_config(batch_size: int, steps: int, nvme_path: Path) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    # CPUs without instructions for bf16 emulate it, slower than they compute in fp32.
    bf16 = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return {
        "steps_per_print": 0,  # the progress display shows it
        "train_batch_size": batch_size,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        "scheduler": _default_schedule(steps),
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }


def _default_schedule(steps: int) -> dict[str, Any]:
    warmup = {"warmup_num_steps": min(WARMUP_STEPS, steps // 2), "warmup_type": "linear"}
    return {"type": "WarmupCosineLR", "params": {**warmup, "total_num_steps": steps, "cos_min_ratio": 0.1}}


def run(args: argparse.Namespace, stack: ExitStack, clock: Callable[[], float]) -> None:
    """Run the whole job. stack: holds what must be undone in the end. clock: seconds since the job started."""
    is_first = start_ranks(stack) == 0
    console = Console(quiet=not is_first)
    output = Path(args.output)
    nvme_path = Path(args.nvme_path or output / "nvme")
    save = None if args.save == "none" else Path(args.save or output / "checkpoint")
    for path in (output, save):
        if path is not None:
            refuse_unwritable(path)
    shape, config, corpus = model_config(args), engine_config(args, nvme_path), load_corpus(args.data)
    if args.config is None:
        stack.enter_context(folder(nvme_path))
    torch.manual_seed(args.seed)
    with torch.device("meta"):
        model = GPT2(shape)
    engine, *_ = infinity.initialize(model=model, config=config)
    stack.callback(engine.close)
    job = Pretraining(engine, shape, corpus, args.seed, Evaluation(args.eval_interval, args.eval_iters), clock)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(engine.describe())
    say(f"text: {corpus.source}, {show_count(len(corpus.train))} bytes")
    steps = args.train_iters or (scheduled_steps(config) if args.config is not None else None)
    if args.load is not None:
        path, steps = resume(engine, args.load, steps)
        say(f"resumed: {path} at step {engine.global_steps} of {steps}")

    record: Callable[[StepRecord], None] = lambda _: None  # noqa: E731
    if args.metrics is not None and is_first:
        record = stack.enter_context(MetricsFile(args.metrics, resume=args.load is not None)).write
    sampled = sample_bytes(args)
    if steps is None:
        end = show_seconds(JOB_SECONDS)
        say(f"steps: chosen after step {MEASURED_STEPS}, so that the job ends after about {end}")
    say()
    with Progress(steps, done=engine.global_steps, console=console) as progress:
        if steps is None:
            steps = job.choose_steps(progress, record, prompts=len(PROMPTS), sample=sampled)
        if args.config is None:
            set_schedule(engine, steps)
        job.train(steps, progress, record)
    outputs = []
    if save is not None:
        outputs.append(("checkpoint", str(engine.save_checkpoint(save, client_state={"train_iters": steps}))))
    tiers = job.tier_bytes()
    texts = job.sample(PROMPTS, sampled) if sampled else []
    if is_first:
        outputs += leave(job, config, corpus, output, texts)
        if texts:
            console.rule(f"sample: {sampled} bytes after each of " + ", ".join(repr(p.strip()) for p in PROMPTS))
            say(joined(texts))
        console.rule("this run")
        console.print(closing_table(job.meter.totals, parameters=shape.num_parameters, losses=last_losses(job),
                                    tier_bytes=tiers, job_seconds=clock()))  # fmt: skip
        say(*output_lines(outputs), sep="\n")


def scheduled_steps(config: Config) -> int | None:
    """Steps until the schedule of the learning rate ends; None if it never does."""
    return getattr(config.scheduler.params, "total_num_steps", None) if config.scheduler is not None else None


def resume(engine: infinity.Engine, folder: str, steps: int | None) -> tuple[Path, int]:
    """Load a checkpoint; (its path, number of steps in all). steps: the number asked for, else the checkpoint's."""
    path, state = engine.load_checkpoint(folder)
    steps = steps or state.get("train_iters")
    if steps is None:
        raise ConfigError(f"The checkpoint {path} does not say how many steps to train. Give --train-iters.")
    return path, int(steps)


def set_schedule(engine: infinity.Engine, steps: int) -> None:
    """Let the default configuration's schedule end at `steps`."""
    assert isinstance(engine.lr_scheduler, LambdaLR)
    schedule = WarmupCosineLR.model_validate(_default_schedule(steps))
    replace_schedule(engine.lr_scheduler, schedule, engine.config.optimizer.params.lr)


def last_losses(job: Pretraining) -> dict[str, float]:
    """The training loss, a mean over ten steps since batches differ, and the held-out loss, at the end."""
    recent = [loss for _, loss in job.losses[-10:]]
    losses = {f"last {len(recent)} batches": sum(recent) / len(recent)}
    return {**losses, "held-out text": job.held_out_losses[-1][1]} if job.held_out_losses else losses


def joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text.strip("\n") for text in texts) + "\n"


def leave(
    job: Pretraining, config: Config, corpus: Corpus, output: Path, texts: Sequence[str]
) -> list[tuple[str, str]]:
    """Write the loss curve and, if there are texts, the sample; (what, path) of each."""
    output.mkdir(parents=True, exist_ok=True)
    curve, outputs = output / "loss.png", []
    if texts:
        (output / "sample.txt").write_text(joined(texts), encoding="utf-8")
        outputs.append(("sample", str(output / "sample.txt")))
    zero, totals = config.zero_optimization, job.meter.totals
    places = (
        "every state on NVMe" if zero.offload_param.device == zero.offload_optimizer.device == "nvme" else "Infinity"
    )
    dtype = "bf16" if config.bf16.enabled else "fp32"
    try:
        plot_loss(
            curve,
            job.losses,
            job.held_out_losses,
            title=f"GPT-2, {show_count(job.shape.num_parameters)} parameters, {places}",
            subtitle=f"{totals.steps:,} steps of {job.meter.tokens_per_step:,} bytes of {corpus.source}; "
            f"{dtype}, {show_seconds(totals.seconds)}",
            chance=math.log(job.shape.vocab_size),
        )
    except ImportError:
        return [("loss curve", "not drawn: matplotlib is not installed"), *outputs]
    return [("loss curve", str(curve)), *outputs]


def start_ranks(stack: ExitStack) -> int:
    """Join the other ranks if torchrun started this process. Returns its rank."""
    if "RANK" not in os.environ:
        return 0
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # torchrun gives each rank one thread, however many cores there are
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("nccl" if cuda else "gloo")
    stack.callback(dist.destroy_process_group)
    return dist.get_rank()


def refuse_unwritable(path: Path) -> None:
    """Raise StorageError before training if nothing can be written to `path`, which need not exist yet."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise StorageError(f"{path} cannot be a folder, since {there} is a file. Name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be made, since {there} is not writable. Name another folder.")


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Make `path`; in the end, remove the folders that were made, if they are empty."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"The folder {path} cannot be made: {error.strerror}. Name another one.") from error
    try:
        yield
    finally:
        for made in missing:
            try:
                made.rmdir()
            except OSError:
                break


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] | None = None) -> int:
    """Return the process's exit code: 0, 2 after an error, 130 after Ctrl-C.

    clock: seconds since the job started, monotonic; it starts now by default.
    """
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun's signal to stop; end as after Ctrl-C
    logging.getLogger("infinity").setLevel(logging.WARNING)  # the job prints these facts itself
    args = parse(arguments)
    with ExitStack() as stack:  # undone when the exception is gone, since its frames refer to parameters
        try:
            run(args, stack, clock or (lambda: time.monotonic() - began))
        except (InfinityError, OSError) as error:
            print(f"pretrain_gpt2.py: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("pretrain_gpt2.py: stopped; no checkpoint was saved", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(clock=process_seconds))  # the interpreter's start and imports count, too
