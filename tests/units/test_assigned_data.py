"""Data assigned to a parameter between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
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
@pytest.mark.parametrize("adopted", [False, True], ids=["pending", "adopted"])
def test_data_that_backward_needs_as_it_was(
    placement: str, prefetch: int | str, adopted: bool, make_engine: OpenEngine
) -> None:
    """Linear layers save a view of their weight, whose memory plain PyTorch keeps; the new data counts afterwards.

    adopted: another forward has copied the new data into the unit's buffer before backward.
    """
    options = {"param": placement, "optim": placement, "prefetch_bytes": prefetch, "unit_size": 4096}
    engine = make_engine(seeded(Linears), update="next_forward", **options)
    train(engine, BATCHES[:2])
    loss = engine(*BATCHES[2])
    weight = engine.module.layers[5].weight
    assigned = torch.full_like(weight.detach(), 0.01)
    weight.data = assigned.clone()
    if adopted:
        with torch.no_grad():
            engine.module.layers[5](BATCHES[0][0])
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


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_data_of_another_dtype_is_refused(bf16: bool, dtype: torch.dtype, make_engine: OpenEngine) -> None:
    """A plain loop would go on with a parameter of that dtype, and compute other numbers."""
    engine = make_engine(seeded(Linears), param="none", optim="none", unit_size=4096, bf16=bf16)
    batches = [tuple(each.bfloat16() if bf16 else each for each in batch) for batch in BATCHES]
    train(engine, batches[:2])
    weight = engine.module.layers[5].weight
    before = weight.detach().clone()
    weight.data = torch.zeros(32, 32, dtype=dtype)
    with pytest.raises(UsageError, match=rf"layers\.5\.weight\.data was assigned a tensor in {dtype}.*value\.to\("):
        engine.settle()
    assert torch.equal(weight.detach(), before)
    train(engine, batches[2:])


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


class Tying(Linears):
    """Linears that assign to the weight of one layer what the function gives of another's, in their third forward."""

    def __init__(self, given: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self._given = given
        self._forwards = 0

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._forwards += 1
        if self._given is not None and self._forwards == 3:
            self.layers[3].weight.data = self._given(self.layers[1].weight)
        return super().forward(x, targets)


@pytest.mark.filterwarnings("ignore:something still refers")
@pytest.mark.parametrize("placement", ["none", "nvme"])
@pytest.mark.parametrize("inside", [False, True], ids=["in the loop", "in forward"])
def test_memory_of_another_parameter_is_refused(placement: str, inside: bool, make_engine: OpenEngine) -> None:
    options = {"param": placement, "optim": placement, "prefetch_bytes": 0, "unit_size": 4096}
    engine = make_engine(seeded(lambda: Tying((lambda w: w.data) if inside else None)), **options)
    layers = engine.module.layers
    train(engine, BATCHES[:2])
    before = layers[3].weight.detach().clone()
    with pytest.raises(UsageError, match=r"layers\.3\.weight\.data was assigned memory of unit layers\.1\."):
        if inside:
            engine(*BATCHES[2])
        else:
            layers[3].weight.data = layers[1].weight.data
    assert torch.equal(layers[3].weight, before)
    train(engine, BATCHES[3:])


@pytest.mark.parametrize("place", [MEMORY, NVME], ids=["memory", "nvme"])
def test_a_copy_of_another_parameter_is_adopted(place: dict[str, Any]) -> None:
    def story(loop: Any) -> list[float]:
        seen = []
        for batch in BATCHES:
            loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            for layer, other in zip(loop.model.layers, loop.model.layers[1:], strict=False):
                layer.weight.data = other.weight.data * 0.9
                other.weight.data = other.weight.data.contiguous()  # the same memory
            seen.append(loss.item())
        return seen

    assert_same_story(lambda: Tying(lambda w: w.data.clone()), story, place=place)
