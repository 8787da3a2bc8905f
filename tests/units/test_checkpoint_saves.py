"""A non-reentrant checkpoint sees the saved tensors that it sees in a plain loop: as many, in the same order, computed
again when backward first asks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.beside import LATE_TOO, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(5)
Run = Callable[["Part", torch.Tensor], torch.Tensor]
again = partial(checkpoint, use_reentrant=False)


class Part(nn.Module):
    """(batch, 32) → the same, by `run`, which recomputes parts of it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.scale = nn.Parameter(1 + torch.randn(32) / 4)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.run(self, x))


class Net(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part(run) for _ in range(4))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


def weight_first(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Backward needs an edited weight before any activation; the recomputation edits it again."""

    def product(x: torch.Tensor) -> torch.Tensor:
        part.scale.data.mul_(0.95)
        return part.scale * part.up(x)

    return again(product, x)


def edited_after_use(part: Part, x: torch.Tensor) -> torch.Tensor:
    """PyTorch ends the recomputation with its last saved tensor, before the edit."""

    def product(x: torch.Tensor) -> torch.Tensor:
        y = part.up(x) * part.scale
        part.down.weight.data.mul_(0.95)
        return y

    return part.down(again(product, x))


def scaled(part: Part, x: torch.Tensor) -> torch.Tensor:
    """The recomputation sees the parameters, where forward saw stand-ins."""
    named = {name: 0.9 * p for name, p in part.up.named_parameters()}
    return functional_call(_Checkpointed(part.up), {f"part.{name}": value for name, value in named.items()}, (x,))


class _Checkpointed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return again(self.part, x)


def with_a_parameter(part: Part, x: torch.Tensor) -> torch.Tensor:
    return again(lambda x, w: part.inner(F.linear(x, w)), x, part.down.weight)


def nested(part: Part, x: torch.Tensor) -> torch.Tensor:
    return again(partial(again, part.inner), x)


def derivative(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Its backward within the recomputation is cut short when that ends."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        create = torch.is_grad_enabled()
        return torch.autograd.functional.jvp(part.up, x, torch.ones_like(x), create_graph=create)[1]

    return part.down(again(slope, x))


def derivative_with_a_parameter(part: Part, x: torch.Tensor) -> torch.Tensor:
    def slope(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, w)
        return torch.autograd.functional.jvp(part.up, x, torch.ones_like(x), create_graph=True)[1]

    return again(slope, x, part.down.weight)


def second_derivative(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Weights are saved by the graphs of backwards, in forward and as it is computed again."""

    def curvature(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(part.inner(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x, create_graph=True)[0]

    return again(curvature, x)


RUNS: list[Run] = [
    weight_first,
    edited_after_use,
    scaled,
    with_a_parameter,
    nested,
    derivative,
    derivative_with_a_parameter,
    second_derivative,
]


@LATE_TOO
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:something still refers")
def test_recomputation_as_in_a_plain_loop(run: Run, accumulation: int, place: dict[str, Any]) -> None:
    place = {**place, "accumulation": accumulation}
    assert_same_story(lambda: Net(run), training(BATCHES[:4]), place=place, units=4, leaks=True)


@LATE_TOO
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:something still refers")
def test_units_of_a_layer(run: Run, place: dict[str, Any]) -> None:
    """Units are so small that modules inside of the checkpoint fetch and hold their own."""
    place = {**place, **({"unit_size": 1024} if "unit_size" in place else {})}
    assert_same_story(lambda: Net(run), training(BATCHES), place=place, units=8, leaks=True)
