"""Cases for groups of ranks: a run that is trained, killed, and resumed by other ranks or in another layout."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.durable import source
from infinity.durable.commits import Commits
from infinity.durable.folder import read_generations
from infinity.durable.manifest import Manifest
from infinity.durable.run import DurableRun
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, InfinityError
from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded
from support.states import states_of

WIDTH = 96
BATCH = 8
"""Samples of a step, over all ranks."""


class Mixed(nn.Module):
    """Linears, a frozen layer, a scalar, and a buffer that counts forwards: (batch, WIDTH) → mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH + 37), nn.Linear(WIDTH + 37, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = torch.tanh(self.second(torch.tanh(self.first(x)))) + x
        x = torch.tanh(self.third(x)) + x
        return (self.frozen(x) * self.scale).float().square().mean()


def config(folder: str, ranks: int, **options: Any) -> Config:
    given = {"unit_size": 2048, "tile_size": 4096, "durable": True, "micro": BATCH // ranks, "bf16": True, **options}
    device = given.pop("device", "nvme")
    return engine_config(device, device, folder=folder, **given)


def opened(folder: str, ranks: int, seed: int = 0, **options: Any) -> TrainingEngine:
    chosen = config(folder, ranks, **options)
    model = seeded(Mixed, seed)
    return open_engine(model.bfloat16() if chosen.bf16.enabled else model, chosen)


def train(engine: TrainingEngine, steps: range) -> list[float]:
    """Return the loss of each step, averaged over ranks."""
    losses = []
    ranks, rank = engine.ranks.size, engine.ranks.rank
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + step)).to(dtype)
        loss = engine(x.chunk(ranks)[rank])
        engine.backward(loss)
        engine.step(client_state={"next": step + 1})
        losses.append(engine.ranks.sum(loss.item()) / ranks)
    return losses


def everything(engine: TrainingEngine) -> dict[str, Any]:
    """Return states, numbers of updates and buffers, by names that no layout changes."""
    found: dict[str, Any] = dict(states_of(engine))
    for unit in engine.units:
        found |= {f"{slot.name}/steps": n for slot, n in zip(unit.layout.slots, unit.steps, strict=True)}
    found |= {name: value for name, value in engine.state_dict().items() if name not in found}
    return found


def interrupted(rank: int, *, folder: str, ranks: int, steps: int, **options: Any) -> dict[str, Any]:
    """Train, and return what is committed."""
    with opened(folder, ranks, **options) as engine:
        train(engine, range(steps))
        engine.settle()
        assert engine.updates.durable is not None
        engine.updates.durable.wait()
        return everything(engine)


def killed(rank: int, *, folder: str, ranks: int, steps: int, **options: Any) -> None:
    """Train, and end by SIGKILL after a step whose commit may be under way."""
    engine = opened(folder, ranks, **options)
    train(engine, range(steps))
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, *, folder: str, ranks: int, until: int = 0, **options: Any) -> dict[str, Any]:
    """Resume in an engine of other initial values. Returns what was loaded, and what training then gives."""
    with opened(folder, ranks, seed=9, **options) as engine:
        client_state = engine.resume()
        loaded = everything(engine)
        generations = [each.number for each in read_generations(Path(folder, "run"))]
        start = engine.global_steps
        losses = train(engine, range(start, until))
        return {
            "client_state": client_state,
            "loaded": loaded,
            "generations": generations,
            "start": start,
            "losses": losses,
            "end": everything(engine),
        }


def uninterrupted(rank: int, *, folder: str, ranks: int, until: int, **options: Any) -> dict[str, Any]:
    with opened(folder, ranks, **{"durable": False, **options}) as engine:
        return {"losses": train(engine, range(until)), "end": everything(engine)}


def stopped_while_resuming(rank: int, *, folder: str, ranks: int, where: str, **options: Any) -> None:
    """End by SIGKILL between the load and its commit, or between the commit and the removal of the old states."""

    def end(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before the commit":
        Commits._commit = end  # type: ignore[method-assign]
    elif where == "before the record":
        DurableRun.write = end  # type: ignore[method-assign]
    else:
        DurableRun.conclude = end  # type: ignore[method-assign]
    engine = opened(folder, ranks, seed=9, **options)
    engine.resume()


def other_formats(rank: int, *, folder: str, ranks: int, before: str, after: str) -> tuple[Any, Any]:
    """Return states after resuming from a commit, and after loading a checkpoint of the same step. before, after:
    formats of moments.
    """
    with opened(folder, ranks, moments=before) as engine:
        engine.resume()
        saved = engine.save_checkpoint(Path(folder, "saved"))
    with opened(folder, ranks, seed=9, durable=False, moments=after) as engine:
        engine.load_checkpoint(saved.parent)
        expected = everything(engine)
    with opened(folder, ranks, seed=9, moments=after) as engine:
        engine.resume()
        return everything(engine), expected


def refused(rank: int, *, folder: str, ranks: int, lacks: int = -1, directory: str = "run") -> str:
    """Return the error of a load. lacks: a rank that cannot see the files of another one. directory: what it loads,
    of which `{rank}` differs between ranks.
    """

    def missing(folder: Path, writer: int) -> Manifest:
        raise CheckpointError(f"rank-{writer:05d}.json is missing on rank {rank}")

    kept = source.manifest_in
    with opened(folder, ranks, seed=9) as engine:
        if rank == lacks:
            source.manifest_in = missing
        try:
            engine.load_checkpoint(Path(folder, directory.format(rank=rank)))
        except InfinityError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            source.manifest_in = kept
    return ""


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
