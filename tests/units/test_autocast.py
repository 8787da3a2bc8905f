"""torch.autocast caches casts of leaf parameters until its context ends; for fetched parameters it must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of, plain
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    with bf16():
        loss: torch.Tensor = model(*batch)
    return loss


def compare(make: Any, around: Any, **options: Any) -> None:
    config = engine_config(**{"prefetch_bytes": 0, **options})
    expected = plain(seeded(make), BATCHES, config, loss_of)
    with open_engine(seeded(make), config) as engine, around():
        losses = []
        for batch in BATCHES:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        del loss
        result = Result(losses, parameters_of(engine))
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)
    assert_close(result, expected, loss=1e-6, parameters=1e-5)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("around", [nothing, bf16], ids=["forward only", "the whole loop"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 2}], ids=str)
def test_training(around: Any, options: dict[str, Any]) -> None:
    """A cast cached around the whole loop would be that of the first step."""
    compare(Stack, around, **options)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    compare(lambda: Stack(run=lambda block, x: checkpoint(block, x, use_reentrant=reentrant)), bf16)


class Inside(Stack):
    """A model with its own context, made once and entered in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.context = bf16()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.context:
            loss = super().forward(tokens, targets)
        return loss


def test_a_context_of_the_models_own() -> None:
    compare(Inside, nothing)


def test_nothing_is_cached_and_the_users_setting_comes_back(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack), prefetch_bytes=0)
    seen = []
    engine.module.blocks[2].up.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with bf16():
        assert torch.is_autocast_cache_enabled()
        loss = engine(*BATCHES[0])
        assert torch.is_autocast_cache_enabled()
    loss.backward()
    assert seen == [False]


def test_the_users_setting_comes_back_from_a_part_of_the_model(make_engine: OpenEngine) -> None:
    """The setting is restored after a call of a part, such as an encoder in `generate`, also if it raises."""
    engine = make_engine(seeded(Stack))
    with torch.no_grad(), bf16():
        engine.module.blocks[1](torch.zeros(1, 2, 32))
        assert torch.is_autocast_cache_enabled()
        with pytest.raises(RuntimeError):
            engine.module.blocks[1](torch.zeros(1, 2, 33))
        assert torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
