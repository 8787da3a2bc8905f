"""Edits reach the tiers: through views of released units too, once, and nothing but edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from conftest import OpenEngine
from infinity.errors import LifetimeError
from support.beside import NVME, PLACES, SCHEDULES, assert_same_story, training
from support.loops import train
from support.models import seeded, vector_batches

BATCHES = vector_batches(5)
BF16 = [(x.bfloat16(), y.bfloat16()) for x, y in BATCHES]


class Layer(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 32**0.5, requires_grad=not frozen)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(F.linear(x, self.weight, self.bias))


class Net(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(frozen) for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), targets.float())


@PLACES
@pytest.mark.parametrize("when", ["first step", "every step", "after an evaluation"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_through_a_kept_view(when: str, place: dict[str, Any]) -> None:
    """`.data`, `.detach()`, a row and an array that were taken once and are written to ever after.

    An evaluation evicts the units, so that the edit is of the buffers that are kept for the views.
    """

    def story(loop: Any) -> Any:
        taken = []

        def extra(loop: Any, number: int) -> Any:
            layers = loop.model.layers
            if number == 0 or when == "every step":
                taken.append((layers[1].weight.data, layers[2].weight.detach()[3], layers[3].weight.detach().numpy()))
            if when == "after an evaluation":
                with torch.no_grad():
                    loop.model(*BATCHES[0])
            for data, row, array in taken[-1:]:
                data.clamp_(-0.2, 0.2)
                row.zero_()
                array[...] = array * 0.9
            return layers[1].weight.detach().clone(), layers[3].weight.detach().clone()

        return training(BATCHES, extra)(loop)

    assert_same_story(Net, story, place=place, units=6, leaks=True)


def views_of_evicted_units(model: Any) -> list[torch.Tensor]:
    """A view of each weight, which an evaluation evicts."""
    views = [layer.weight.data for layer in model.layers]
    with torch.no_grad():
        x, targets = BATCHES[0]
        model(x.to(views[0].dtype), targets)
    return views


@PLACES
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_through_a_view_that_is_dropped_before_its_unit_is_fetched(bf16: bool, place: dict[str, Any]) -> None:
    def extra(loop: Any, number: int) -> Any:
        views = views_of_evicted_units(loop.model)
        views[number].clamp_(-0.125, 0.125)
        views[2][3] = 0.25
        views.clear()
        return [layer.weight.detach().clone() for layer in loop.model.layers]

    place = {**place, **({"unit_size": 2048} if bf16 and "unit_size" in place else {})}
    options: dict[str, Any] = {"lr": 1e-2, "tolerance": 2e-2} if bf16 else {}
    story = training(BF16 if bf16 else BATCHES, extra)
    assert_same_story(Net, story, place=place, units=6, bf16=bf16, **options)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_through_views_of_released_units_are_in_their_states(
    dropped: bool, bf16: bool, make_engine: OpenEngine
) -> None:
    """States are read from the tiers: a checkpoint has the edits, masters included."""
    engine = make_engine(seeded(Net), **{**NVME, "unit_size": 2048}, bf16=bf16)
    train(engine, BF16[:2] if bf16 else BATCHES[:2])
    views = views_of_evicted_units(engine.module)
    for view in views:
        view.fill_(3.0)
    if dropped:
        views.clear()
    weights = [layer.weight for layer in engine.module.layers]
    for number, weight in enumerate(weights):
        assert (engine.state_dict()[f"layers.{number}.weight"] == 3.0).all()
        assert (infinity.get_full_fp32_param(weight) == 3.0).all()
        assert (weight.detach() == 3.0).all()


@pytest.mark.filterwarnings("ignore:something still refers")
def test_through_a_view_after_the_unit_is_written_anew(make_engine: OpenEngine) -> None:
    """The view shows the new values, so that an edit in place counts as in a plain loop."""
    engine = make_engine(seeded(Net), **NVME)
    weight = engine.module.layers[1].weight
    view = weight.data
    with torch.no_grad():
        engine.module(*BATCHES[0])  # which evicts the unit
    infinity.set_full_fp32_param(weight, torch.full((32, 32), 0.5))
    view.mul_(0.5)
    assert (weight.detach() == 0.25).all()
    engine.settle()
    assert (infinity.get_full_fp32_param(weight) == 0.25).all()


@pytest.mark.parametrize("asked", ["parameter", "states"])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_through_a_view_while_the_unit_is_written_anew(
    asked: str, make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cannot count, so it is an error; without the edit the view follows."""
    engine = make_engine(seeded(Net), **NVME)
    monkeypatch.setattr(engine.parts.runner, "refresh_viewed", lambda: None)  # the view shows old values meanwhile
    weight = engine.module.layers[1].weight
    view = weight.data

    def overwrite(value: float) -> None:
        with torch.no_grad():
            engine.module(*BATCHES[0])  # which evicts the unit
        infinity.set_full_fp32_param(weight, torch.full((32, 32), value))

    overwrite(0.25)
    assert weight.detach()[0, 0] == view[0, 0] == 0.25
    overwrite(0.5)
    view.zero_()
    with pytest.raises(LifetimeError, match=r"a view of the parameters of unit layers\.1 was edited"):
        weight.sum() if asked == "parameter" else engine.settle()
    assert (weight.detach() == 0.5).all()


class Failed:
    """A read that fails when it is waited for."""

    def wait(self) -> None:
        raise OSError(5, "Input/output error")

    def done(self) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:something still refers")
def test_what_a_failed_read_leaves_under_a_view_is_not_used(
    make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer that the view refers to holds none of the unit's values then."""
    engine = make_engine(seeded(Net), **NVME)
    monkeypatch.setattr(engine.parts.runner, "refresh_viewed", lambda: None)  # the next use reads the new values
    weight = engine.module.layers[1].weight
    view = weight.data
    with torch.no_grad():
        engine.module(*BATCHES[0])
    infinity.set_full_fp32_param(weight, torch.full((32, 32), 0.25))

    def read(extent: Any, destination: torch.Tensor, offset: int = 0) -> Failed:
        destination.fill_(0xFF)
        return Failed()

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.tiers["nvme"], "read", read)
        with pytest.raises(OSError, match="Input/output error"):
            weight.sum()
    assert (weight.detach() == 0.25).all() and (view == 0.25).all()


@pytest.mark.filterwarnings("ignore:something still refers")
def test_a_view_shows_after_the_step_what_was_set_before_it(make_engine: OpenEngine) -> None:
    """The unit is frozen: neither an update nor a forward brings it up to date."""
    engine = make_engine(seeded(lambda: Net(frozen=True)), **NVME, update="next_forward")
    weight = engine.module.layers[1].weight
    view = weight.data
    for number, batch in enumerate(BATCHES):
        engine.backward(engine(*batch))
        infinity.set_full_fp32_param(weight, torch.full((32, 32), float(number)))
        engine.step()
        assert (view == number).all()


@SCHEDULES
def test_what_nobody_edited_is_not_written_back(
    update: str, make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates have written it."""
    written: list[str] = []
    engine = make_engine(seeded(Net), **NVME, update=update)
    monkeypatch.setattr(engine.parts.store.write_back, "write_shard", lambda unit, lease: written.append(unit.name))
    train(engine, BATCHES)
    assert not written
    engine.module.layers[1].weight.data.zero_()
    train(engine, BATCHES[:1])
    assert {*written} == {"layers.1"}


def test_an_edit_that_is_undone_after_an_eviction(make_engine: OpenEngine) -> None:
    """The tier has the edit by then: the values of before differ from it."""
    engine = make_engine(seeded(Net), **NVME)
    weight = engine.module.layers[1].weight
    before = weight.detach().clone()
    for value in (torch.zeros_like(before), before):
        with torch.no_grad():
            weight.copy_(value)
            engine.module(*BATCHES[0])
        assert torch.equal(weight.detach(), value)
