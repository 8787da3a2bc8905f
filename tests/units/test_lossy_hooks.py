"""The user's saved-tensor hooks may round: backward gets the rounded values, of weights, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from support.beside import LATE_TOO, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(5)


def coarse(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor rounded so coarsely that it shows in every gradient."""
    return (tensor.detach() * 4).round() / 4 if tensor.is_floating_point() else tensor


class Rounded(nn.Module):
    """(batch, 32) → the same, under hooks that are entered around a module that holds units or within it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.inside = inside

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with saved_tensors_hooks(coarse, lambda packed: packed):
                y = F.linear(x, layer.weight, layer.bias) if self.inside else layer(x)
            x = x + torch.tanh(y)
        return F.mse_loss(x, targets)


@LATE_TOO
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_hooks_that_round(inside: bool, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Rounded(inside), training(BATCHES), place=place, units=6, leaks=True)


@LATE_TOO
@pytest.mark.filterwarnings("ignore:something still refers")
def test_hooks_of_the_loop(place: dict[str, Any]) -> None:
    """Hooks around the whole forward."""

    def story(loop: Any) -> list[float]:
        seen = []
        for batch in BATCHES:
            with saved_tensors_hooks(coarse, lambda packed: packed):
                loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    assert_same_story(lambda: Rounded(False), story, place=place, units=6, leaks=True)
