"""A unit is not updated while its parameters are still in use, whatever holds them.

Mutations that these tests caught (parameters differ from a plain loop's): `UnitStore.finished_with` without
`is_viewed`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from support.configs import engine_config
from support.loops import Result, assert_close, parameters_of, plain, train
from support.models import seeded, vector_batches

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
BATCHES = vector_batches(6)


class Straight(nn.Module):
    """Uses its weight twice, first without a gradient. So in backward the weight's gradient is complete while the first
    use still needs the weight.

    (batch, width) → the same. between: called in backward between these two.
    """

    def __init__(self, width: int, between: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self._between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.weight.detach())
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._between())
        return x + hidden @ self.weight


class Straights(nn.Module):
    """(batch, width) and targets of that shape → mean squared error. run: how a layer is called."""

    def __init__(self, run: Run, between: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Straight(32, between) for _ in range(6))
        self.run = run

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = self.run(layer, x)
        return F.mse_loss(x, targets)


def checkpointed(reentrant: bool) -> Run:
    def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return out

    return run


@pytest.mark.parametrize(
    "run",
    [lambda layer, x: layer(x), checkpointed(True), checkpointed(False)],
    ids=["plain", "reentrant", "non-reentrant"],
)
def test_a_weight_that_backward_needs_after_its_gradient(run: Run, make_engine: OpenEngine) -> None:
    """The update waits for the step, since recomputation keeps the weight itself and would read the new values.

    Backward waits for an update under way, so that an early one changes the result.
    """
    config = engine_config(prefetch_bytes=0, update="during_backward", lr=1e-2)
    expected = plain(seeded(lambda: Straights(run, lambda: None)), BATCHES, config)

    def let_updates_end() -> None:
        for unit in engine.units:
            if unit.job is not None:
                unit.job.done.wait()

    engine = make_engine(seeded(lambda: Straights(run, let_updates_end)), config)
    assert len(engine.units) == 6
    losses = train(engine, BATCHES)
    assert_close(Result(losses, parameters_of(engine)), expected)
