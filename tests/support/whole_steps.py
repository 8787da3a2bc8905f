"""Whole steps by `engine.train_batch`, and by a loop over the micro-batches, to be compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from support.configs import engine_config
from support.loops import open_engine, parameters_of
from support.models import seeded, token_batches
from support.states import states_of

STEPS = 3


def config_of(accumulation: int = 3, **options: Any) -> Config:
    return engine_config(**{"accumulation": accumulation, "unit_size": 20_000, **options})


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def outcome(engine: TrainingEngine, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return everything that training has changed."""
    values = {**states_of(engine), **parameters_of(engine)}
    values["losses"] = torch.stack([loss.detach() for loss in losses])
    values["steps"] = torch.tensor([engine.global_steps, engine.skipped_steps, engine.loss_scale.value])
    return values


def loop(make: Callable[[], nn.Module], config: Config, batches: Sequence[Any], loss_of: Any) -> dict[str, Any]:
    """Train with `backward` and `step` for each micro-batch."""
    with open_engine(seeded(make), config) as engine:
        losses: list[torch.Tensor] = []
        norms = []
        for start in range(0, len(batches), engine.batch.accumulation):
            total: Any = None
            for batch in batches[start : start + engine.batch.accumulation]:
                loss = loss_of(engine, batch)
                engine.backward(loss)
                engine.step()
                total = loss.detach() if total is None else total + loss.detach()
            losses.append(total / engine.batch.accumulation)
            norms.append(engine.grad_norm)
        return {**outcome(engine, losses), "norms": norms}


def by_batches(
    make: Callable[[], nn.Module],
    config: Config,
    batches: Sequence[Any],
    loss_fn: Any = None,
    blocks: Callable[[Any], Sequence[nn.Module] | None] = blocks_of,
) -> tuple[dict[str, Any], str]:
    """Train with `train_batch`. Returns the outcome, and why the last step ran as a loop although it had blocks."""
    with open_engine(seeded(make), config) as engine:
        losses, norms = [], []
        iterator = iter(batches)
        for _ in range(len(batches) // engine.batch.accumulation):
            losses.append(engine.train_batch(iterator, loss_fn, blocks=blocks(engine.module)))
            norms.append(engine.grad_norm)
        return {**outcome(engine, losses), "norms": norms}, engine._batches.reason


def plainly(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert found.pop("norms") == expected.pop("norms")
    for name, value in expected.items():
        assert value.dtype == found[name].dtype and value.numel() == found[name].numel(), name
        one, other = (v.detach().contiguous().reshape(-1).view(torch.uint8) for v in (value, found[name]))
        assert torch.equal(one, other), name


def check(
    make: Callable[[], nn.Module],
    config: Config,
    *,
    batches: Sequence[Any] | None = None,
    loss_of: Any = plainly,
    loss_fn: Any = None,
    blocks: Callable[[Any], Sequence[nn.Module] | None] = blocks_of,
    reason: str = "",
) -> None:
    """Assert that both ways of training have the same bits. reason: part of why `train_batch` runs as a loop."""
    batches = batches or token_batches(STEPS * config.resolve_batch(1).accumulation)
    expected = loop(make, config, batches, loss_of)
    found, said = by_batches(make, config, batches, loss_fn, blocks)
    assert reason in said and bool(reason) == bool(said)
    assert_equal(found, expected)
