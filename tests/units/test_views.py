"""A unit is not updated while its parameters are still in use, whatever holds them.

Mutations that these tests caught (parameters differ from a plain loop's, or backward is refused):
`Schedule.update` without any of its conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from support.configs import engine_config
from support.loops import Result, assert_close, parameters_of, plain, train
from support.models import seeded, vector_batches

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
BATCHES = vector_batches(6)


class KeepsView(torch.autograd.Function):
    """x @ weight that keeps a view of its weight on `ctx`, which autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.view = weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.view, None


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Straight(nn.Module):
    """Uses its weight twice, first without a gradient. So in backward the weight's gradient is complete while the first
    use still needs the weight.

    (batch, width) → the same. between: called in backward between these two. product: the first use.
    """

    def __init__(self, width: int, between: Callable[[], None], product: Product) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self._between = between
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self._product(x, self.weight.detach()))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._between())
        return x + hidden @ self.weight


class Straights(nn.Module):
    """(batch, width) and targets of that shape → mean squared error. run: how a layer is called."""

    def __init__(self, run: Run, between: Callable[[], None], product: Product = torch.matmul) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Straight(32, between, product) for _ in range(6))
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


def plainly(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer(x)
    return out


@pytest.mark.parametrize(
    ("run", "product"),
    [
        (plainly, torch.matmul),
        (plainly, KeepsView.apply),
        (checkpointed(True), torch.matmul),
        (checkpointed(False), torch.matmul),
    ],
    ids=["plain", "kept view", "reentrant", "non-reentrant"],
)
@pytest.mark.filterwarnings("ignore:something still refers")
def test_a_weight_that_backward_needs_after_its_gradient(run: Run, product: Product, make_engine: OpenEngine) -> None:
    """The update waits for the step, since recomputation keeps the weight itself and would read the new values.

    Backward waits for an update in flight, so an early update changes the result.
    """
    config = engine_config(prefetch_bytes=0, update="during_backward", lr=1e-2)
    expected = plain(seeded(lambda: Straights(run, lambda: None, product)), BATCHES, config)

    def let_updates_end() -> None:
        for unit in engine.units:
            if unit.update is not None:
                unit.update.done.wait()

    engine = make_engine(seeded(lambda: Straights(run, let_updates_end, product)), config)
    assert len(engine.units) == 6
    losses = train(engine, BATCHES)
    assert_close(Result(losses, parameters_of(engine)), expected)


class Gate(nn.Module):
    """Multiplies by its weight, which the graph holds as a reference or, under hooks of the user's, itself."""

    def __init__(self, hooks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t) if self.hooks else nullcontext():
            return x + torch.tanh(x) * self.weight


class Gates(nn.Module):
    def __init__(self, hooks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate(hooks) for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # so that the graph holds the first weight as well
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


@pytest.mark.parametrize("hooks", [False, True], ids=["references", "parameters"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_a_graph_that_is_kept_when_the_trace_expects_one_backward(hooks: bool, make_engine: OpenEngine) -> None:
    """Updates wait for the step, as the graph still holds the units when the first backward ends."""
    seen = []
    for managed in (False, True):
        model = seeded(lambda: Gates(hooks))
        loop: Any
        if managed:
            loop = make_engine(model, unit_size=256, prefetch_bytes=0, update="during_backward", lr=1e-2)
        else:
            loop = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
        for number, batch in enumerate(BATCHES):
            loss = loop(*batch) if managed else model(*batch)
            if number == 3:
                loss.backward(retain_graph=True)
            loss.backward()
            loop.step()
            loop.zero_grad() if not managed else None
            seen.append(loss.item())
    assert seen[: len(BATCHES)] == pytest.approx(seen[len(BATCHES) :])
