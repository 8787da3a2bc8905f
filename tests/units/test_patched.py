"""Forwards that are replaced while an engine has the model, as adapters and attention kernels replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.beside import PLACES, SCHEDULES, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(6)


class Layer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


class Halved(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        given = self.layers[4].forward
        self.layers[4].forward = lambda x: given(x) - 0.1 * x  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


Patch = Callable[[pytest.MonkeyPatch, Any], None]


def of_the_class(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(Layer, "forward", Halved.forward)


def of_the_models_class(patch: pytest.MonkeyPatch, model: Any) -> None:
    first = Net.forward
    patch.setattr(Net, "forward", lambda self, x, targets: 2 * first(self, x, targets))


def of_one_module(patch: pytest.MonkeyPatch, model: Any) -> None:
    first = model.layers[1].forward
    patch.setattr(model.layers[1], "forward", lambda x: first(x) + x)


def the_class(patch: pytest.MonkeyPatch, model: Any) -> None:
    for layer in model.layers[1:5]:
        layer.__class__ = Halved


@SCHEDULES
@PLACES
@pytest.mark.parametrize("change", [of_the_class, of_the_models_class, of_one_module, the_class])
def test_a_forward_that_is_replaced(
    change: Patch, place: dict[str, Any], update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new forward runs from the next call on, the first one again once it is put back."""

    def story(loop: Any) -> Any:
        seen = training(BATCHES[:2])(loop)
        with monkeypatch.context() as patch:
            change(patch, loop.model)
            seen += training(BATCHES[2:4])(loop)
        return seen + training(BATCHES[4:])(loop)

    assert_same_story(Net, story, place={**place, "update": update}, units=6)
