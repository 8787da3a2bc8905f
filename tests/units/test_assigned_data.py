"""Data assigned to a parameter between its forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conftest import OpenEngine
from infinity.errors import LifetimeError, UsageError
from infinity.units.released import is_released
from support.beside import MEMORY, NVME, assert_same_story
from support.loops import parameters_of, train
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(4)


@pytest.mark.parametrize("placement", ["none", "nvme"])
@pytest.mark.parametrize("prefetch", [0, "auto"])
def test_data_that_backward_needs_as_it_was(placement: str, prefetch: int | str, make_engine: OpenEngine) -> None:
    """Linear layers save a view of their weight, whose memory plain PyTorch keeps; the new data counts afterwards."""
    options = {"param": placement, "optim": placement, "prefetch_bytes": prefetch, "unit_size": 4096}
    engine = make_engine(seeded(Linears), update="next_forward", **options)
    train(engine, BATCHES[:2])
    loss = engine(*BATCHES[2])
    weight = engine.module.layers[5].weight
    assigned = torch.full_like(weight.detach(), 0.01)
    weight.data = assigned.clone()
    with pytest.raises(LifetimeError, match=r"layers\.5\.weight\.data was assigned between forward and backward"):
        engine.backward(loss)
    del loss
    assert torch.equal(weight.detach(), assigned)
    train(engine, BATCHES[2:])


class Scale(nn.Module):
    """Multiplies by its weight, which autograd saves itself and not as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("place", [MEMORY, {**NVME, "unit_size": 256}], ids=["memory", "nvme"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "after an eviction"])
def test_data_that_backward_finds_in_the_parameter(later: bool, place: dict[str, Any]) -> None:
    """Plain PyTorch computes gradients with the new data where autograd saved the parameter itself."""

    def story(loop: Any) -> Any:
        seen, layers = [], loop.model.layers
        for x, _ in BATCHES:
            x = x.clone().requires_grad_()
            loss = loop.model(x)
            layers[2].weight.data = torch.full((32,), 1.5)
            layers[4].weight.data = layers[4].weight.data * 0.5
            if later:
                seen += [layer.weight.sum().item() for layer in layers]
            loop.backward(loss)
            loop.step()
            assert x.grad is not None
            seen += [loss.item(), x.grad.clone()]
        return seen

    assert_same_story(Scales, story, place={**place, "update": "next_forward"}, units=6)


def test_data_that_is_refused_leaves_the_parameter_guarded(make_engine: OpenEngine) -> None:
    """A parameter of a released unit refuses data of another shape at once, keeps its values and fetches its unit."""
    engine = make_engine(seeded(Linears), param="none", optim="none", unit_size=4096)
    train(engine, BATCHES[:2])
    before = parameters_of(engine)["layers.5.weight"]
    weight = engine.module.layers[5].weight
    with pytest.raises(LifetimeError, match=r"shape \[3, 3\].*close\(restore=True\)"):
        weight.data = torch.zeros(3, 3)
    engine.settle()
    assert is_released(weight)
    assert torch.equal(weight.detach(), before)


@pytest.mark.filterwarnings("ignore:something still refers")
def test_data_is_refused_while_something_views_the_parameter(make_engine: OpenEngine) -> None:
    """In a plain loop the view would keep the values of before, here it shows those of now."""
    engine = make_engine(seeded(Linears), param="none", optim="none", unit_size=4096)
    train(engine, BATCHES[:2])
    weight = engine.module.layers[5].weight
    view = weight.data
    before = view.clone()
    weight.data = torch.zeros(32, 32)
    with pytest.raises(UsageError, match=r"layers\.5\.weight\.data was assigned while something refers"):
        engine.settle()
    assert torch.equal(weight.detach(), before) and torch.equal(view, before)
    train(engine, BATCHES[2:])
