"""The demo's job: construct an engine around a GPT-2, train it, save it, and report the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from gpt2.data import load_corpus
from gpt2.duration import JOB_SECONDS, MEASURED_STEPS, MIN_STEPS, show_seconds
from gpt2.engine_config import engine_config, scheduled_steps, set_schedule
from gpt2.meter import MetricsFile, StepRecord
from gpt2.options import AUTO, NOT_DURABLE, PROMPTS, JobOptions
from gpt2.outputs import Output, joined, refuse_unwritable, working_folder, write_outputs
from gpt2.pretraining import Pretraining
from gpt2.progress import Progress
from gpt2.report import closing_table, output_lines
from infinity.engine.initialize import initialize
from infinity.errors import ConfigError
from infinity.inputs import number_of
from infinity.sim.gpt2 import GPT2
from infinity.sizes import show_count


def run(options: JobOptions, stack: ExitStack, clock: Callable[[], float]) -> None:
    """Run a whole job. stack: undoes at its end what the job has set up. clock: seconds since the job started."""
    console = Console(quiet=join_ranks(stack) != 0)
    for path in (options.output, options.save):
        if path is not None:
            refuse_unwritable(path)
    job = Job(options, open_training(options, stack, clock), console, clock)
    job.describe()
    steps = job.resume()
    steps = job.train(steps, job.open_metrics(stack))
    job.finish(steps)


def join_ranks(stack: ExitStack) -> int:
    """Join the other ranks if torchrun started this process. Returns its rank."""
    if "RANK" not in os.environ:
        return 0
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(number_of("LOCAL_RANK", 0))
    else:  # torchrun gives each rank one thread, however many cores there are
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // number_of("LOCAL_WORLD_SIZE", 1, least=1)))
    dist.init_process_group("nccl" if cuda else "gloo")
    stack.callback(dist.destroy_process_group)
    return dist.get_rank()


def open_training(options: JobOptions, stack: ExitStack, clock: Callable[[], float]) -> Pretraining:
    """Read the configuration and the text, and construct the model and its engine. Collective."""
    config, corpus = engine_config(options), load_corpus(options.data)
    if options.config is None:
        stack.enter_context(working_folder(options.nvme_folder))
    if config.infinity.durable:  # the engine commits the step under way, and ends the process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.manual_seed(options.seed)
    with torch.device("meta"):
        model = GPT2(options.shape)
    engine, *_ = initialize(model=model, config=config)
    stack.callback(engine.close)
    return Pretraining(engine, options.shape, corpus, options.seed, options.evaluation, clock)


def steps_of(state: Mapping[str, Any], path: Path, steps: int | None) -> int:
    """Return `steps`, or else the number of steps of the job that saved `state`, the client_state of `path`."""
    steps = steps or state.get("train_iters")
    if steps is None:
        raise ConfigError(f"The checkpoint {path} does not say how many steps to train. Give --train-iters.")
    return int(steps)


class Job:
    """A job on one rank, whose training is open. All ranks make the same calls; rank 0 prints and writes files."""

    def __init__(
        self, options: JobOptions, training: Pretraining, console: Console, clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._training = training
        self._engine = training.engine
        self._durable = self._engine.config.infinity.durable
        self._resumed: int | None = None
        """The step of the loaded checkpoint or commit."""
        self._last: StepRecord | None = None
        """The record of that step, if a commit has it."""
        self._console = console
        self._print = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self._clock = clock

    def describe(self) -> None:
        """Print the units, where their states live, and the text."""
        corpus = self._training.corpus
        self._print(self._engine.describe())
        self._print(f"text: {corpus.source}, {show_count(len(corpus.train))} bytes")

    def resume(self) -> int | None:
        """Load the last commit or the checkpoint, if there is one. Returns the number of steps in all; None: it is
        chosen later.
        """
        options, engine = self._options, self._engine
        steps = options.train_iters
        if steps is None and options.config is not None:
            steps = scheduled_steps(engine.config)
        path, state = self._load(options.load)
        if state is not None:
            steps = steps_of(state, path, steps)
            self._training.go_on(state)
            self._resumed = engine.global_steps
            self._last = StepRecord(**state["record"]) if "record" in state else None
            self._print(f"resumed: {path} at step {engine.global_steps} of {steps}")
        if self._durable and steps is None:
            raise ConfigError("A durable run needs the number of its steps, which must not change. Give --train-iters.")
        return steps

    def _load(self, load: str | None) -> tuple[Path, dict[str, Any] | None]:
        """Load the last commit of a durable run, or else the checkpoint in `load`. Returns its path and client_state;
        None: there is none.
        """
        if self._durable and (state := self._engine.resume()) is not None:
            return self._run_folder, state
        if load == AUTO and not self._durable:
            raise ConfigError(NOT_DURABLE)
        return (Path(), None) if load in (None, AUTO) else self._engine.load_checkpoint(load)

    @property
    def _run_folder(self) -> Path:
        config = self._engine.config
        return config.zero_optimization.durable_paths[0] / config.infinity.run

    def open_metrics(self, stack: ExitStack) -> Callable[[StepRecord], None]:
        """Return the function that records a step in the metrics file."""
        options = self._options
        if options.metrics is None or self._training.rank != 0:
            return lambda record: None
        file = MetricsFile(options.metrics, self._resumed, self._last, sync=self._durable)
        return stack.enter_context(file).write

    def train(self, steps: int | None, record: Callable[[StepRecord], None]) -> int:
        """Train up to step `steps`; None: choose the number by the speed of the first ones. Returns the number."""
        if self._durable and steps is not None and self._engine.global_steps >= steps:
            self._print(f"steps: all {steps} are done")  # by a job that ended before its outputs were written
            return steps
        if steps is None:
            end = show_seconds(JOB_SECONDS)
            least = f"with {MIN_STEPS} steps or more"
            self._print(f"steps: chosen after step {MEASURED_STEPS}, so that the job ends after about {end}, {least}")
        self._print()
        plain = self._options.plain_bytes
        with Progress(steps, done=self._engine.global_steps, console=self._console, plain_bytes=plain) as progress:
            if steps is None:
                sample = self._options.sample_bytes
                steps = self._training.choose_steps(progress, record, prompts=len(PROMPTS), sample=sample)
            if self._options.config is None:
                set_schedule(self._engine, steps)
            try:
                self._training.train(steps, progress, record)
            except (KeyboardInterrupt, SystemExit):
                if self._durable:
                    progress.say(f"stopped; infinity resume {self._run_folder} goes on from the last committed step")
                raise
        return steps

    def finish(self, steps: int) -> None:
        """Save the checkpoint, write the other files and print the closing table."""
        options, training = self._options, self._training
        outputs: list[Output] = [("durable run", str(self._run_folder))] if self._durable else []
        outputs += self._save(options.save, steps) if options.save is not None else []
        tiers = training.tier_bytes()
        texts: list[str] = []
        began = self._clock()
        if options.sample_bytes:
            self._print(f"sample: writing {options.sample_bytes} bytes after each of {len(PROMPTS)} prompts")
            texts = training.sample(PROMPTS, options.sample_bytes)
        sample_seconds = self._clock() - began if texts else 0.0
        if training.rank != 0:
            return
        if options.output is not None:
            outputs += write_outputs(training, options.output, texts)
        if texts:
            prompts = ", ".join(repr(prompt.strip()) for prompt in PROMPTS)
            self._console.rule(f"sample: {options.sample_bytes} bytes after each of {prompts}")
            self._print(joined(texts))
        if training.losses:
            self._console.rule("this run")
            self._console.print(closing_table(training.meter.totals, parameters=options.shape.num_parameters,
                                              losses=training.last_losses(), tier_bytes=tiers,
                                              job_seconds=self._clock(), sample_seconds=sample_seconds,
                                              plain_bytes=options.plain_bytes))  # fmt: skip
        if outputs:
            self._print(*output_lines(outputs), sep="\n")

    def _save(self, folder: Path, steps: int) -> list[Output]:
        path = self._engine.save_checkpoint(folder, client_state=self._training.client_state(steps))
        return [("checkpoint", str(path))]
