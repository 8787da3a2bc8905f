"""Cases with one rank that differs or fails. They run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.errors import InfinityError, RanksError
from infinity.native import _aio
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

SAMPLES = 4

Change = Callable[[Stack], Any]
"""Changes one rank's model; may return model_parameters for `initialize`."""


def another_shape(model: Stack) -> None:
    model.head = nn.Linear(32, 64, bias=False)


def one_block_less(model: Stack) -> None:
    model.blocks = model.blocks[:-1]


def another_dtype(model: Stack) -> None:
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().double(), requires_grad=False)


def a_frozen_head(model: Stack) -> None:
    model.head.requires_grad_(False)


def another_name(model: Stack) -> None:
    model.blocks[2].uq = model.blocks[2].up  # comes after `down`, and `up` is found by that name no more
    del model.blocks[2].up


def another_buffer(model: Stack) -> None:
    model.head.register_buffer("scale", torch.ones(2))


def blocks_in_another_order(model: Stack) -> None:
    model.add_module("head", model._modules.pop("head"))
    model.add_module("blocks", model._modules.pop("blocks"))


def two_groups(model: Stack) -> Any:
    others = [p for name, p in model.named_parameters() if "head" not in name]
    return [{"params": model.head.parameters()}, {"params": others}]


def another_rate(model: Stack) -> Any:
    return [{"params": model.parameters(), "lr": 1e-2}]


def of_another_model(model: Stack) -> Any:
    return Stack().parameters()


def all_frozen(model: Stack) -> None:
    model.requires_grad_(False)


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        another_shape,
        one_block_less,
        another_dtype,
        a_frozen_head,
        another_name,
        another_buffer,
        blocks_in_another_order,
        two_groups,
        another_rate,
        of_another_model,
        all_frozen,
    )
}


def odd(
    rank: int,
    *,
    folder: str,
    which: int,
    change: str = "",
    options: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
    faults: bool = False,
) -> dict[str, str]:
    """Rank `which` changes its model, or has other options of `engine_config` or top-level keys, or a disk that fails
    while the engine is made. After that all ranks train with an engine that they have in common.

    Returns the type and text of what making the engine raised.
    """
    mine = rank == which
    own = options or {} if mine else {}
    raw = engine_config(**{"folder": folder, "micro": SAMPLES, **own}).model_dump(exclude_unset=True, mode="json")
    if mine:
        raw |= top or {}
    model = seeded(Stack)
    given = CHANGES[change](model) if mine and change else None
    raised: dict[str, str] = {}
    if mine and faults:
        _aio._inject([{"where": "event", "only": "write", "error": errno.EIO, "times": -1}])
    try:
        with infinity.initialize(model=model, config=raw, model_parameters=given, device=CpuDevice())[0] as engine:
            train(engine, token_batches(1, batch=SAMPLES, seed=rank))
    except (InfinityError, OSError) as error:
        raised = {"type": type(error).__name__, "text": str(error)}
    finally:
        _aio._inject([])
    config = Config.load(engine_config(folder=folder, micro=SAMPLES))
    with infinity.initialize(model=seeded(lambda: Stack(depth=1)), config=config, device=CpuDevice())[0] as engine:
        losses = train(engine, token_batches(1, batch=SAMPLES, seed=rank))
    assert all(torch.isfinite(torch.tensor(losses)))
    return raised


def is_single(rank: int, *, folder: str, stage: int, what: str) -> str:
    """One rank reads a state while the other trains on; return each rank's error."""
    config = engine_config("none", "none", folder=folder, micro=SAMPLES, stage=stage)
    with open_engine(seeded(lambda: Stack(depth=2)), config) as engine:
        batches = token_batches(4, batch=SAMPLES)
        train(engine, batches[:2])
        try:
            if rank == 0:
                looks = {
                    "parameter": lambda: infinity.get_full_fp32_param(engine.module.blocks[1].up.weight),
                    "state_dict": engine.state_dict,
                    "save": lambda: engine.save_checkpoint(folder + "/saved"),
                }
                looks[what]()
            train(engine, batches[2:])
        except RanksError as error:
            return str(error)
    return ""
