"""Parameters that autograd saves themselves, instead of a view: of a user's own type, and with assigned data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.beside import LATE_TOO, PLACES, SCHEDULES, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(5)


class Tagged(nn.Parameter):
    """A user's own type, with a field."""

    tag: str


class Tag(torch.autograd.Function):
    """x * weight; checks the type and field of the weight in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _, weight = ctx.saved_tensors
        assert type(weight) is Tagged and weight.tag == "kept"
        return gradients[0] * weight.as_subclass(torch.Tensor), None


def product(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x * part.weight


def tagged_product(part: Part, x: torch.Tensor) -> torch.Tensor:
    return Tag.apply(x, part.weight) if torch.is_grad_enabled() else product(part, x)


def assigned_before(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.weight.data = 0.9 * part.weight.data
    return product(part, x)


def assigned_after(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Assign data after the forward; backward sees the later data in the parameter."""
    y = product(part, x)
    part.weight.data = 0.9 * part.weight.data
    return y


def assigned_twice(part: Part, x: torch.Tensor) -> torch.Tensor:
    y = assigned_before(part, x)
    return assigned_before(part, torch.tanh(y))


Use = Callable[["Part", torch.Tensor], torch.Tensor]


class Part(nn.Module):
    """(batch, 32) → the same. kind: of the parameter, which `use` multiplies with."""

    def __init__(self, use: Use, kind: type, trained: bool) -> None:
        super().__init__()
        self.use = use
        self.weight = kind(1 + torch.randn(32) / 4, requires_grad=trained)
        if kind is Tagged:
            self.weight.tag = "kept"
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.use(self, torch.tanh(self.linear(x)))))


class Net(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part(*args) for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


@LATE_TOO
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_type_of_the_users(trained: bool, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(product, Tagged, trained), training(BATCHES), place=place, units=6)


@PLACES
def test_a_custom_function_gets_the_type_back(place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(tagged_product, Tagged, False), training(BATCHES), place=place, units=6)


@LATE_TOO
@pytest.mark.parametrize("use", [assigned_before, assigned_after, assigned_twice])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_data_assigned_in_forward(use: Use, trained: bool, place: dict[str, Any]) -> None:
    """Backward reads the present data of a parameter that autograd saved itself."""
    assert_same_story(lambda: Net(use, nn.Parameter, trained), training(BATCHES), place=place, units=6)


@SCHEDULES
def test_data_assigned_between_forward_and_backward(update: str) -> None:
    """Backward reads data assigned in the loop to parameters that autograd saved themselves."""

    def story(loop: Any) -> list[float]:
        seen = []
        for x, targets in BATCHES:
            loss = loop.model(x, targets)
            for layer in loop.model.layers:
                layer.weight.data = 0.9 * layer.weight.detach()
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    for place in ({"param": "none", "optim": "none"}, {"unit_size": 4096, "prefetch_bytes": 0}):
        assert_same_story(lambda: Net(product, nn.Parameter, True), story, place={**place, "update": update}, units=6)
