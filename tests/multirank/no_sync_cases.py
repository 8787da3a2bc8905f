"""Code of the ranks in test_no_sync.py: steps with some micro-batches in a `no_sync` block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from multirank.cases import SAMPLES, counted, global_batches, part
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import Stack, seeded
from support.states import states_of

Step = tuple[int, int]
"""Micro-batches of one step in a block, and after it."""


def model() -> nn.Module:
    return seeded(lambda: Stack(width=32, depth=3, tied=True))


def config_of(folder: str, accumulation: int, **options: Any) -> Config:
    return engine_config(folder=folder, micro=SAMPLES, accumulation=accumulation, **options)


def held_back(
    rank: int,
    *,
    ranks: int,
    folder: str,
    steps: Sequence[Step],
    own: bool = False,
    in_block: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank's part of every batch. own: by `loss.backward()`. in_block: False to do without the blocks.

    Returns the losses, what is there at the end, and step by step what was exchanged in the block and after it.
    """
    losses = []
    exchanged = []
    with open_engine(model(), config_of(folder, **options)) as engine:

        def train(batches: Sequence[Any]) -> None:
            for batch in batches:
                loss = engine(*part(batch, rank))
                losses.append(loss.item())
                if own:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)

        batches = global_batches(sum(map(sum, steps)), SAMPLES * ranks)
        for inside, outside in steps:
            seen = [counted(engine)]
            with engine.no_sync() if in_block else nullcontext():
                train(batches[:inside])
            engine.updates.gradients.settle()
            seen.append(counted(engine))
            train(batches[inside : inside + outside])
            batches = batches[inside + outside :]
            engine.step()
            seen.append(counted(engine))
            assert engine.micro_steps == 0, "the step was not made"
            exchanged.append([{name: b[name] - a[name] for name in a} for a, b in pairwise(seen)])
        units = len(engine.units)
        return {
            "losses": losses,
            "values": parameters_of(engine) | states_of(engine),
            "exchanged": exchanged,
            "units": units,
        }


def plainly(ranks: int, steps: Sequence[Step], config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with torch's AdamW on the batches of all ranks. Return the loss of every micro-batch and the final
    parameters.
    """
    trained = model()
    params = config.optimizer.params
    optimizer = torch.optim.AdamW(trained.parameters(), params.lr, params.betas, params.eps, params.weight_decay)
    accumulation = config.resolve_batch(ranks).accumulation
    batches = iter(global_batches(sum(map(sum, steps)), SAMPLES * ranks))
    losses = []
    for step in steps:
        for _ in range(sum(step)):
            loss = trained(*next(batches))
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in trained.named_parameters()}
