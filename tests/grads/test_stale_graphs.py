"""Backwards of graphs that were built before the last step, which PyTorch allows where no weight was saved."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, plain, train, trained
from support.models import seeded


class Embeddings(nn.Module):
    """(batch,) tokens → mean of the sum of their embeddings. Backward reads no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 32) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(tokens) for table in self.tables]).sum(0).square().mean()


class BuiltTogether:
    """Returns the losses of two steps, both built before the first step."""

    def __init__(self) -> None:
        self._later: deque[torch.Tensor] = deque()

    def __call__(self, model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not self._later:
            self._later += [model(*batch), 3 * model(batch[0].flip(0) // 2)]
        return self._later.popleft()


BATCHES = [(torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed)),) for seed in range(8)]


@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_a_second_backward_meets_updates_under_way(param: str, optim: str) -> None:
    """Updates that have not read their gradients yet."""
    config = engine_config(param, optim, clip=0.05, unit_size=4096, prefetch_bytes=8192)
    expected = trained(seeded(Embeddings), BATCHES, config, None, BuiltTogether())
    with open_engine(seeded(Embeddings), config) as engine:
        pipeline, kernel = engine.updates.pipeline, engine.updates.pipeline._stages._kernel

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.02)
            kernel(*args, **kwargs)

        pipeline._stages._kernel = slow
        pipeline._is_immediate = lambda job: False  # type: ignore[method-assign]
        losses = train(engine, BATCHES, BuiltTogether())
        assert_same(Result(losses, parameters_of(engine), len(engine.parts.units)), expected)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_a_second_backward_does_not_overtake_the_update(param: str, optim: str, clip: float, late: bool) -> None:
    """Its gradient replaces none that an update still has to read."""
    config = engine_config(param, optim, clip=clip, unit_size=4096, prefetch_bytes=8192)
    result = trained(seeded(Embeddings), BATCHES, config, LateDevice() if late else None, BuiltTogether())
    assert_close(result, plain(seeded(Embeddings), BATCHES, config, BuiltTogether()))
    reference = engine_config("none", "none", clip=clip, unit_size=4096)
    assert_same(result, trained(seeded(Embeddings), BATCHES, reference, None, BuiltTogether()))
