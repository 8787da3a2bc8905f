"""Calls for states, weights and checkpoints. `call` runs in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import RanksError
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(4, batch=SAMPLES)


def first(engine: TrainingEngine) -> Any:
    return engine.module.blocks[0].up.weight


def second(engine: TrainingEngine) -> Any:
    return engine.module.blocks[1].up.weight


CALLS: dict[str, Callable[[TrainingEngine, Path], Any]] = {
    "read": lambda engine, folder: infinity.get_full_fp32_param(first(engine)),
    "read another": lambda engine, folder: infinity.get_full_fp32_param(second(engine)),
    "read a neighbour": lambda engine, folder: infinity.get_full_fp32_param(engine.module.blocks[0].up.bias),
    "read a moment": lambda engine, folder: infinity.get_full_optimizer_state(first(engine), "exp_avg"),
    "set": lambda engine, folder: infinity.set_full_fp32_param(first(engine), torch.ones(first(engine).shape)),
    "set a moment": lambda engine, folder: infinity.set_full_optimizer_state(
        first(engine), "exp_avg", torch.ones(first(engine).shape)
    ),
    "state dict": lambda engine, folder: engine.state_dict(),
    "save": lambda engine, folder: engine.save_checkpoint(folder / "saved"),
    "weights": lambda engine, folder: engine.save_16bit_model(folder),
    "load": lambda engine, folder: engine.load_checkpoint(folder / "before"),
    "nothing": lambda engine, folder: None,
    "train": lambda engine, folder: train(engine, BATCHES[2:]),
}


def call(rank: int, *, folder: str, calls: tuple[str, str]) -> dict[str, str]:
    """Train, and make this rank's call of the two. Returns what was raised by it."""
    place = Path(folder)
    with open_engine(seeded(Stack), engine_config(folder=place, micro=SAMPLES, unit_size=2048, bf16=True)) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(place / "before")
        try:
            CALLS[calls[rank]](engine, place)
        except RanksError as error:
            return {"raised": str(error)}
    return {"raised": ""}
