"""Calls for states, weights and checkpoints, by name; "another" is one for another unit.

`call` runs in the processes of a `support.ranks.Group`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
import infinity.deepspeed as deepspeed
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


def groups(engine: TrainingEngine) -> list[dict[str, Any]]:
    return engine.optimizer.param_groups


def block(
    engine: TrainingEngine,
    params: Callable[[TrainingEngine], Any],
    modifier: int | None = None,
    of: Any = infinity.GatheredParameters,
) -> None:
    with of(params(engine), modifier_rank=modifier):
        pass


CALLS: dict[str, Callable[[TrainingEngine, Path], Any]] = {
    "read": lambda engine, folder: infinity.get_full_fp32_param(first(engine)),
    "read another": lambda engine, folder: infinity.get_full_fp32_param(second(engine)),
    "read a neighbour": lambda engine, folder: infinity.get_full_fp32_param(engine.module.blocks[0].up.bias),
    "read a moment": lambda engine, folder: infinity.get_full_optimizer_state(first(engine), "exp_avg"),
    "set": lambda engine, folder: infinity.set_full_fp32_param(first(engine), torch.ones(first(engine).shape)),
    "set a moment": lambda engine, folder: infinity.set_full_optimizer_state(
        first(engine), "exp_avg", torch.ones(first(engine).shape)
    ),
    "set another": lambda engine, folder: infinity.set_full_fp32_param(
        second(engine), torch.ones(second(engine).shape)
    ),
    "set a gradient": lambda engine, folder: infinity.set_full_grad(first(engine), torch.ones(first(engine).shape)),
    "read a gradient": lambda engine, folder: infinity.get_full_grad(first(engine)),
    "gather": lambda engine, folder: block(engine, first),
    "gather another": lambda engine, folder: block(engine, second),
    "gather all": lambda engine, folder: block(engine, lambda engine: engine.module.parameters()),
    "edit": lambda engine, folder: block(engine, first, 0),
    "edit another": lambda engine, folder: block(engine, second, 0),
    "edit as rank 1": lambda engine, folder: block(engine, first, 1),
    "discard": lambda engine, folder: block(engine, first, of=deepspeed.zero.GatheredParameters),
    "optimizer": lambda engine, folder: engine.optimizer.state_dict(),
    "load optimizer": lambda engine, folder: engine.optimizer.load_state_dict(
        {"state": {}, "param_groups": [{**group, "params": [*range(len(group["params"]))]} for group in groups(engine)]}
    ),
    "load with": lambda engine, folder: engine.load_with(lambda model: None),
    "state dict": lambda engine, folder: engine.state_dict(),
    "save": lambda engine, folder: engine.save_checkpoint(folder / "saved"),
    "weights": lambda engine, folder: engine.save_16bit_model(folder),
    "load": lambda engine, folder: engine.load_checkpoint(folder / "before"),
    "nothing": lambda engine, folder: None,
    "train": lambda engine, folder: train(engine, BATCHES[2:]),
}


def opened(folder: str, param: str, optim: str, stage: int = 3) -> TrainingEngine:
    options: dict[str, Any] = {"unit_size": 2048, "bf16": True, "stage": stage, "update": "after_backward"}
    return open_engine(
        seeded(lambda: Stack(depth=2)), engine_config(param, optim, folder=folder, micro=SAMPLES, **options)
    )


def all_calls(rank: int, *, folder: str) -> list[str]:
    """Make each call on all ranks, in one training. Returns those that were made."""
    made = []
    with opened(folder, "nvme", "nvme") as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(Path(folder) / "before")
        for name, make in CALLS.items():
            if "another" not in name:
                loss = engine(*BATCHES[0]) if "gradient" in name else None
                if loss is not None:
                    engine.backward(loss)
                make(engine, Path(folder))
                if loss is not None:
                    engine.step()
                made.append(name)
        assert torch.isfinite(torch.tensor(train(engine, BATCHES[:1]))).all()
    return made


def call(rank: int, *, folder: str, calls: tuple[str, str], stage: int = 3) -> dict[str, str]:
    """Train, and make this rank's call of the two. Returns what was raised by it."""
    place = Path(folder)
    tiers = ("nvme" if stage == 3 else "none", "nvme")
    with opened(folder, *tiers, stage=stage) as engine:
        train(engine, BATCHES[:1])
        if "load" in calls:
            engine.save_checkpoint(place / "before")
        if "gradient" in calls[0]:
            engine.backward(engine(*BATCHES[0]))
        try:
            CALLS[calls[rank]](engine, place)
        except RanksError as error:
            return {"raised": str(error)}
    return {"raised": ""}
