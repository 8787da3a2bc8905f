"""`infinity plan`: whether a model fits a machine, how long a step takes, and what bounds it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from rich.console import Console

from infinity.cli.console import (
    FAILED,
    INTERRUPTED,
    check_output,
    fail,
    one_line_errors,
    say,
    say_json,
    size_of,
    warnings_as_notes,
    write_output,
)
from infinity.cli.plan_config import assumed, load
from infinity.cli.plan_shown import shown, striping
from infinity.config import Config
from infinity.engine.describe import kept
from infinity.errors import ConfigError, InfinityError
from infinity.plan.plan import Plan
from infinity.sim.gpt2 import WITH_COMPILER, GPT2Config, PlannedModel, gpt2, of_transformers
from infinity.sim.machine import Links, Machine
from infinity.sim.measured import MeasuredTimes
from infinity.sim.needs import memory_name
from infinity.sim.own_module import check_forward, of_file
from infinity.sim.planner import assumed_rss, largest, predict
from infinity.sizes import show_count
from infinity.tiers.space import IN_MEMORY, file_system_of


@dataclass(frozen=True)
class Flags:
    """The command's options, under their names in `infinity.cli.main`. None: not given."""

    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    seq_length: int | None
    batch_size: int | None
    untie_embeddings_and_output_weights: bool
    checkpoint_activations: bool
    model: Path | None
    module: str | None
    config: Path | None
    changes: list[str]
    train_batch: bool
    bandwidths: Path | None
    gpus: int
    nodes: int
    device_memory: str | None
    host_memory: str | None
    nvme: str | None
    endurance: str | None
    tile: str | None
    this_machine: bool
    max_model: bool
    trace: Path | None
    as_json: bool

    @property
    def ranks(self) -> int:
        return self.nodes * max(1, self.gpus)

    def shape(self) -> GPT2Config:
        """Return GPT-2's shape. Raises ConfigError for an invalid one.

        Exits with an error if two of a folder of a model, a module of one's own and a shape are given.
        """
        names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.model is not None and self.module is not None:
            fail("--model and --module both describe the model: leave out one of them")
        own = "--model" if self.model is not None else "--module"
        if (self.model or self.module) is not None and (given.keys() - {"seq_length"} or self.max_model):
            fail(f"{own} describes the shape: leave out the flags of GPT-2's shape, and --max-model")
        if self.max_model and self.num_layers is not None:
            fail("--max-model finds the number of layers: leave out --num-layers")
        return GPT2Config(
            **given,
            tie_word_embeddings=not self.untie_embeddings_and_output_weights,
            checkpoint_activations=self.checkpoint_activations,
        )


@dataclass(frozen=True)
class _Job:
    """Job that the options describe, without problems."""

    shape: GPT2Config
    make: Callable[[], PlannedModel]
    config: Config
    machine: Machine
    links: Links | None
    endurance: int | None
    dtype: torch.dtype
    """That of the model's parameters in the user's script."""


def run(flags: Flags) -> None:
    """Print the prediction. Exits with 1 if the model does not fit."""
    with one_line_errors(), warnings_as_notes():
        with Console(stderr=True).status("predicting the run, and changes with which it fits …"):  # on a terminal
            job = _measured(flags, _job(flags))
            if flags.max_model:
                _say_largest(flags, job)
                return
            is_measured = flags.this_machine and not job.machine.gpus and job.links is not None
            busy = [*_busy()] if is_measured else []  # before its own operations are timed
            found = predict(
                job.make,
                job.config,
                job.machine,
                job.links,
                MeasuredTimes() if is_measured else None,
                train_batch=flags.train_batch,
                endurance=job.endurance,
            )
        if flags.trace is not None and found.simulation is not None:
            write_output("--trace", flags.trace, json.dumps(found.simulation.chrome_trace()))
        notes = [
            *_chosen(flags),
            *busy,
            *assumed(job.config, job.dtype),
            *kept(job.config, found.plan, found.ranks_per_node),
            *_of_folders(flags, found.plan),
        ]
        if flags.as_json:
            say_json({**found.to_json(), "notes": notes})
        else:
            say(*shown(found, job.machine, notes), *striping(job.config))
    raise typer.Exit(FAILED if found.needs.limits else 0)


def _measured(flags: Flags, job: _Job) -> _Job:
    """Return the job with the memory of a process that was measured here: of what a module of one's own imports, or,
    unless bandwidths have it, of transformers' Trainer, which imports libraries that it finds.
    """
    is_known = flags.model is not None and job.links is not None
    if (flags.model or flags.module) is None or is_known or job.machine.gpus:
        return job
    from infinity.cli.links.bench import COMPILER, TRAINER, process_memory

    imports, described = [TRAINER], "transformers and the libraries that it finds"
    if flags.model is None and "transformers" not in sys.modules:  # which a file of one's own has imported
        compiles = assumed_rss(job.make(), job.machine) >= WITH_COMPILER
        imports, described = ([COMPILER], "torch and its compiler") if compiles else ([], "torch")
    try:
        memory = process_memory(*imports)
    except InfinityError:  # such as in a container that does not hold a second process
        return job

    def make() -> PlannedModel:
        return replace(job.make(), process=memory.nbytes, of_files=memory.of_files, measured_with=described)

    links = None if job.links is None else replace(job.links, baseline_rss=memory.nbytes)
    return replace(job, make=make, links=links)


def _busy() -> Iterator[str]:
    """Yield that other processes use the processors, which lengthens operations that are timed."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        yield (
            f"operations were timed while other processes used the processors (load {load:.1f}, {cores} cores): "
            "predict again while nothing else runs"
        )


def _of_folders(flags: Flags, plan: Plan) -> Iterator[str]:
    """Yield each folder of states whose files are in memory here, or that this machine lacks."""
    for folder in () if plan.io is None else plan.io.folders:
        if (kind := file_system_of(folder)) in IN_MEMORY:
            yield f"{folder} is on {kind} here, which is memory: states there take host memory, which nvme counts"
        elif flags.this_machine and not folder.exists():
            yield f"{folder} does not exist here: create it, unless a Trainer or DeepSpeed script does"


def _chosen(flags: Flags) -> Iterator[str]:
    """Yield what is planned in place of a model and a config that are not given."""
    if flags.model is None and flags.module is None and flags.num_layers is None and flags.hidden_size is None:
        yield (
            "no model was given, so this is GPT-2 small: plan your own with --module FILE.py:FUNCTION, one of "
            "transformers with --model FOLDER, or another GPT-2 with --num-layers and --hidden-size"
        )
    if flags.config is None:
        yield "no --config was given, so this is bf16 and AdamW in stage 3, with every state on nvme"


class _Checks:
    """Checks of the options, each of which prints its problems."""

    def __init__(self) -> None:
        self.code = 0

    @contextmanager
    def check(self) -> Iterator[None]:
        """Print the problems of the block, and continue after it. Ctrl-C exits."""
        try:
            with one_line_errors():
                yield
        except typer.Exit as ended:
            if ended.exit_code == INTERRUPTED:
                raise
            self.code = max(self.code, ended.exit_code)


def _job(flags: Flags) -> _Job:
    """Return what the options describe. Exits with a line for each problem of any of them."""
    checks = _Checks()
    check = checks.check
    shape = machine = links = model = endurance = config = None
    make: Callable[[], PlannedModel] | None = None
    for option, value in (("--endurance", flags.endurance), ("--trace", flags.trace)):
        if value is not None and flags.bandwidths is None:
            with check():
                fail(f"{option} needs the seconds of a step: give --bandwidths")
    with check():
        if flags.trace is not None:
            check_output("--trace", flags.trace)
    with check():
        endurance = None if flags.endurance is None else size_of("--endurance", flags.endurance)
    with check():
        links = None if flags.bandwidths is None else Links.read(flags.bandwidths)
    machine = _machine(flags, checks)
    with check():
        shape = flags.shape()
        make = _maker(flags, shape)
        model = make()
    with check():
        config = _config(flags, flags.ranks if machine is None else machine.ranks, model)
    if flags.module is not None and model is not None:
        with check():
            check_forward(model, f"--module {flags.module}")
    if checks.code or shape is None or make is None or config is None or machine is None or model is None:
        raise typer.Exit(checks.code)
    return _Job(shape, make, config, machine, links, endurance, model.dtype)


def _maker(flags: Flags, shape: GPT2Config) -> Callable[[], PlannedModel]:
    folder, module, tile_bytes = flags.model, flags.module, _tile_bytes(flags)
    sequence, checkpoint = flags.seq_length, flags.checkpoint_activations
    if module is not None:
        return lambda: of_file(module, sequence=sequence, checkpoint=checkpoint, tile_bytes=tile_bytes)
    if folder is not None:
        return lambda: of_transformers(folder, sequence=sequence, checkpoint=checkpoint, tile_bytes=tile_bytes)
    if flags.max_model:
        shape = replace(shape, num_layers=1)  # of which the config needs the width only
    return lambda: gpt2(shape, tile_bytes)


def _tile_bytes(flags: Flags) -> int | None:
    nbytes = None if flags.tile is None else size_of("--tile", flags.tile)
    if nbytes == 0:
        fail("--tile must be more than 0, not 0")
    return nbytes


def _config(flags: Flags, ranks: int, model: PlannedModel | None) -> Config:
    config = load(flags.config, flags.batch_size, ranks, model, flags.changes)
    if flags.max_model and config.infinity.cache_bytes and config.zero_optimization.stage < 3 and config.notes.filled:
        raise ConfigError(
            '--max-model: a config of stage 0 to 2 with "auto" keeps a whole model in memory: use stage 3'
        )
    return config


def _machine(flags: Flags, checks: _Checks) -> Machine | None:
    """Return the machine of the options; None if they have problems."""
    here = Machine.here(Path())
    if flags.this_machine:
        with checks.check():
            if flags.gpus or flags.device_memory or flags.host_memory or flags.nvme or flags.nodes > 1:
                fail("--this-machine describes the machine: leave out --gpus, --nodes and sizes of memory")
            return here
        return None
    sizes = {}
    for name, option, text, here_bytes in (
        ("host_memory", "--host-memory", flags.host_memory, here.host_memory),
        ("nvme", "--nvme", flags.nvme, here.nvme),
        ("device_memory", "--device-memory", flags.device_memory, 0),
    ):
        with checks.check():
            sizes[name] = here_bytes if text is None else size_of(option, text)
    if len(sizes) == 3:
        with checks.check():
            return Machine(nodes=flags.nodes, gpus=flags.gpus, **sizes)
    return None


def _say_largest(flags: Flags, job: _Job) -> None:
    shape, tile_bytes = job.shape, _tile_bytes(flags)

    def make(layers: int) -> PlannedModel:
        return gpt2(replace(shape, num_layers=layers), tile_bytes)

    baseline = assumed_rss(make(1), job.machine) if job.links is None else job.links.baseline_rss
    found = largest(make, job.config, job.machine, baseline, train_batch=flags.train_batch)
    width, limits = shape.hidden_size, " and ".join(map(memory_name, found.limits))
    if not found.blocks:
        fail(f"no GPT-2 of width {width} fits: one layer exceeds {limits}")
    parameters = replace(shape, num_layers=found.blocks).num_parameters
    if flags.as_json:
        counts = {"num_layers": found.blocks, "hidden_size": width, "parameters": parameters}
        say_json({**counts, "limits": found.limits, "notes": [*assumed(job.config)]})
    else:
        line = f"{found.blocks} layers of width {width}: {show_count(parameters)} parameters; one more exceeds {limits}"
        say(line, *assumed(job.config))
