"""First batches of ranks. These functions run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded


class Padded(nn.Module):
    """A model that takes a batch and its mask, which is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() if mask is None else (x * mask[:, None]).square().mean()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    lines, logger = _Lines(), logging.getLogger("infinity")
    logger.addHandler(lines)
    try:
        yield lines.found
    finally:
        logger.removeHandler(lines)


def _batch(kind: str, rank: int, number: int) -> torch.Tensor:
    """Return micro-batch `number`. kind: "same" on all ranks, "distinct", "zeros", or the only number that differs."""
    own = kind == "distinct" or kind == str(number)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + (rank if own else 0)))
    return torch.zeros(4, 8) if kind == "zeros" else x


def warned(
    rank: int, *, batches: str, folder: str, stage: int, accumulation: int = 1, whole_steps: bool = False
) -> list[str]:
    """Train two steps, after a forward without gradients. Returns this rank's warnings about batches."""
    places = {} if stage == 3 else {"param": "none", "optim": "cpu"}
    config = engine_config(**places, folder=folder, stage=stage, accumulation=accumulation, unit_size=100)
    with _warnings() as lines, open_engine(seeded(Padded), config) as engine:
        with torch.no_grad():
            engine(_batch("same", rank, 9))
        for step in range(2):
            xs = [_batch(batches, rank, step * accumulation + number) for number in range(accumulation)]
            if whole_steps:
                engine.train_batch(iter(xs))
                continue
            for x in xs:
                engine.backward(engine(x, mask=torch.tensor([1.0, 1.0, 1.0, 0.0])))
                engine.step()
    return [line for line in lines if "batches" in line and "tmpfs" not in line]  # folders have the names of tests


def parts_of_a_model(rank: int, *, folder: str) -> list[str]:
    """Train engines whose data-parallel ranks are this rank alone, as under tensor parallelism, on the same batch."""
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    with _warnings() as lines:
        config = engine_config(folder=folder)
        with TrainingEngine(seeded(Padded), config, device=CpuDevice(), process_group=mesh["data"]) as engine:
            engine.backward(engine(_batch("same", rank, 0)))
            engine.step()
    return [line for line in lines if "batches" in line and "tmpfs" not in line]  # folders have the names of tests
