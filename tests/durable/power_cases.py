"""Cases for one rank or a group of ranks: a durable run whose writes are recorded, and one that resumes.

Each rank is a node: its drive is the folder node-RANK.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from durable.recorder import Committed, End, Log, Returned, contents, recorded
from infinity.durable.folder import manifest_file
from infinity.engine.training import TrainingEngine
from infinity.errors import StorageError
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import VOCABULARY, Stack

NVME = "nvme"


@dataclass
class Trained:
    """Steps → losses, and the parameters at the end."""

    start: int = 0
    losses: list[float] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def node(folder: str, rank: int) -> Iterator[None]:
    """Enter the folder of a rank's drive."""
    before, own = Path.cwd(), Path(folder, f"node-{rank}")
    (own / NVME).mkdir(parents=True, exist_ok=True)
    os.chdir(own)  # since the path in the config is the same on all ranks
    try:
        yield
    finally:
        os.chdir(before)


def opened(**options: Any) -> TrainingEngine:
    torch.manual_seed(0)
    return open_engine(Stack(16, 2), engine_config(folder=NVME, **options))


def step(engine: TrainingEngine, rank: int, number: int) -> float:
    generator = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(VOCABULARY, (4, 5), generator=generator)
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step(client_state={"step": number})
    return loss.item()


def interrupted(
    rank: int, *, folder: str, steps: int, ends: Sequence[End] = (), late: float = 0.1, **options: Any
) -> tuple[Log, Trained]:
    """Train a durable run to the end through processes that end before. Returns what it wrote, and how a run trains
    that nothing interrupts.
    """
    log = Log(rank, Path(folder, "order").absolute())
    with node(folder, rank):
        with recorded(log, late=late * (1 + rank)):
            for end in (*ends, None):
                _train(log, rank, end.step if end is not None else steps, end, options)
        return log, _uninterrupted(log, rank, steps, options)


def _train(log: Log, rank: int, stop: int, end: End | None, options: dict[str, Any]) -> None:
    engine = opened(durable=True, **options)
    try:
        state = engine.resume()
        start = 0 if state is None else state["step"]
        log.note(Committed(start))
        if not log.extents:
            assert engine.parts.plan.io is not None and engine.parts.plan.io.durable is not None
            log.extents, log.nbytes = engine.parts.plan.io.durable.extents, engine.parts.plan.io.nbytes
            manifest = manifest_file(Path(NVME, "run", "0001"), rank)
            log.files[manifest.name] = manifest.read_bytes()
        log.end = end
        for number in range(start + 1, stop + 1):
            step(engine, rank, number)
            log.note(Returned(number))
        engine.settle()
        assert engine.updates.durable is not None
        try:
            engine.updates.durable.wait()
        except StorageError:
            assert end is not None
        else:
            assert end is None, "the process was to end in this commit"
    finally:
        log.end = None
        with suppress(StorageError):
            engine.close()


def _uninterrupted(log: Log, rank: int, steps: int, options: dict[str, Any]) -> Trained:
    """Train without durable states, and note the states after each step."""
    found = Trained()
    with opened(**options) as engine:
        for number in range(1, steps + 1):
            found.losses.append(step(engine, rank, number))
            engine.settle()
            log.expected[number] = contents(engine, log.extents)
        found.values = parameters_of(engine)
    return found


def resumed(rank: int, *, folder: str, steps: int, **options: Any) -> Trained:
    """Go on from what the drives hold, to the same last step."""
    with node(folder, rank), opened(durable=True, **options) as engine:
        state = engine.resume()
        found = Trained(0 if state is None else state["step"])
        found.losses = [step(engine, rank, number) for number in range(found.start + 1, steps + 1)]
        found.values = parameters_of(engine)
        return found
