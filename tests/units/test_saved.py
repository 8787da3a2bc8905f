"""Autograd saves references instead of bytes: a saved tensor of a unit is found in the unit's present buffer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import OpenEngine
from infinity.engine.training import TrainingEngine
from infinity.errors import LifetimeError
from infinity.model.saved import topmost_hooks
from infinity.units import residents
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.lifetime import Residents, assert_nothing_leaked, assert_trains_like_plain, leased, pool_buffers
from support.loops import assert_close, assert_same, open_engine, plain, trained
from support.models import Block, Linears, Stack, seeded, token_batches, vector_batches

VECTORS = vector_batches(6)
TOKENS = token_batches(6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 3}], ids=str)
def test_linears(bias: bool, options: dict[str, Any]) -> None:
    """A linear layer's saved weight is a view that follows no later assignment to `weight.data`."""
    assert_trains_like_plain(lambda: Linears(bias=bias), VECTORS, units=8, unit_size=4096, **options)


def test_linears_in_bf16_are_the_same_everywhere() -> None:
    batches = [(x.bfloat16(), y) for x, y in VECTORS]
    results = [
        trained(seeded(Linears), batches, engine_config(param, optim, bf16=True, unit_size=2048, prefetch_bytes=0))
        for param, optim in PLACEMENTS
    ]
    assert results[0].units == 8
    for result in results[1:]:
        assert_same(result, results[0])


def test_nothing_saved_keeps_a_buffer(make_engine: OpenEngine) -> None:
    """After a forward with gradients no resident unit is viewed by anything but its parameters."""
    engine = make_engine(seeded(Linears), unit_size=4096, prefetch_bytes=0)
    residents = Residents(engine)
    loss = engine(*VECTORS[0])
    assert not any(unit.is_viewed() for unit in leased(engine))
    assert all(unit.references > 0 for unit in engine.units[1:])
    engine.backward(loss)
    assert all(unit.references == 0 for unit in engine.units)
    engine.step()
    assert residents.most <= pool_buffers(engine) < len(engine.units)


class KeepsTranspose(torch.autograd.Function):
    """x @ weight.t(), with the view kept as an attribute, which no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.w = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.w

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ ctx.w.t(), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Keeping(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(KeepsTranspose.apply(x, self.weight))


def keeping() -> Linears:
    model = Linears()
    model.layers = nn.ModuleList(Keeping(32) for _ in range(8))
    return model


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=str)
def test_a_view_kept_by_a_function(options: dict[str, Any]) -> None:
    """The view's buffer is never reused, its values are correct, and one warning names each unit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains_like_plain(keeping, VECTORS, units=8, quarantines=True, unit_size=4096, **options)
    named = [
        str(w.message).split(" of unit ")[1].split(" after ")[0] for w in caught if "still refers" in str(w.message)
    ]
    assert named and len(named) == len(set(named))
    assert all(name.startswith("layers.") for name in named)


class SavesLate(torch.autograd.Function):
    """x * weight; autograd saves the weight after `between` has run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, between: Callable[[], object]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x * weight[0]
        between()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = torch.zeros_like(weight)
        gradient[0] = (gradients[0] * x).sum(0)
        return gradients[0] * weight[0], gradient, None


class Evicting(Linears):
    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = SavesLate.apply(x, self.layers[0].weight, lambda: [layer(x.detach()) for layer in self.layers])
        return super().forward(x, targets)


def test_a_parameter_that_is_saved_after_its_unit_was_released() -> None:
    assert_trains_like_plain(Evicting, VECTORS, units=8, unit_size=4096)


def test_a_view_that_the_model_returns(make_engine: OpenEngine) -> None:
    """The view is the caller's, and keeps its values when the buffer is reused."""

    class Returns(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            loss = super().forward(tokens, targets)
            return {"loss": loss, "row": self.head.weight[3], "block": [self.blocks[1](self.embedding(tokens))]}

    model = seeded(Returns)
    expected = model.head.weight[3].detach().clone()
    engine = make_engine(model, prefetch_bytes=0)
    out = engine(*TOKENS[0])
    assert residents.behind(out["row"]) is None
    engine.backward(out["loss"] + out["row"].sum())
    engine.step()
    for _ in range(2):
        engine.backward(engine(*TOKENS[1])["loss"])
        engine.step()
    assert torch.equal(out["row"], expected)
    assert not engine.parts.store.kept.warned


def test_a_view_that_a_block_returns() -> None:
    class Tied(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.up.weight.t(), self.norm.weight

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Tied(32) for _ in range(6))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            extra = torch.zeros(())
            views = []
            for block in self.blocks:
                x, *more = block(x)
                views += more
            for view in views:
                extra = extra + view.square().mean()
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + extra

    assert_trains_like_plain(Model, TOKENS, units=8)


# -- edits in place --------------------------------------------------------------------------------------------------


def test_an_edit_of_a_parameter_between_forward_and_backward(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack))
    loss = engine(*TOKENS[0])
    with torch.no_grad():
        engine.module.blocks[2].up.weight.mul_(0.5)
    with pytest.raises(LifetimeError, match=r"inplace operation: parameter blocks\.2\.up\.weight"):
        engine.backward(loss)


def test_an_edit_of_a_parameter_whose_unit_was_evicted_since(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack), prefetch_bytes=0)
    loss = engine(*TOKENS[0])
    assert engine.units[1].lease is None
    with torch.no_grad():
        engine.module.blocks[0].up.weight.mul_(0.5)
    with pytest.raises(LifetimeError, match=r"inplace operation: parameter blocks\.0\.up\.weight"):
        engine.backward(loss)


def test_an_edit_of_an_activation(make_engine: OpenEngine) -> None:
    """PyTorch's check is disabled under hooks, so the hooks check, with PyTorch's text."""

    class Edits(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = torch.exp(self.embedding(tokens))
            out = self.blocks[0](x)
            x.add_(1.0)
            return F.cross_entropy(self.head(out).flatten(0, 1), targets.flatten())

    plain_model = seeded(Edits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_model(*TOKENS[0]).backward()
    engine = make_engine(seeded(Edits))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(engine(*TOKENS[0]))


def test_tensors_of_other_models_are_checked_too(make_engine: OpenEngine) -> None:
    make_engine(seeded(Stack))
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    y = (x * weight).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# -- graphs that live longer -----------------------------------------------------------------------------------------


def penalised(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    """A gradient penalty: the gradient of the input's gradient, through the same saved references."""
    x, y = batch
    x = x.clone().requires_grad_()
    loss = model(x, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total: torch.Tensor = loss + slope.square().sum()
    return total


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=str)
def test_double_backward(options: dict[str, Any]) -> None:
    assert_trains_like_plain(Linears, VECTORS, units=8, loss_of=penalised, unit_size=4096, **options)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_a_gradient_penalty_ends_no_micro_batch(update: str) -> None:
    """Replicated gradient sums stay until the backward that produces gradients of parameters."""
    config = engine_config("none", "cpu", stage=1, accumulation=2, update=update, unit_size=4096)
    sent = []

    def watched(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        loss = penalised(model, batch)
        if isinstance(model, TrainingEngine):
            sent.append(len(model.updates.gradients.units))
        return loss

    found = trained(seeded(Linears), VECTORS, config, loss_of=watched)
    assert_close(found, plain(seeded(Linears), VECTORS, config, watched))
    assert sent == [0] * len(VECTORS)


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"update": "next_forward"}], ids=str)
def test_a_graph_that_is_kept_for_a_second_backward(options: dict[str, Any], late_device: LateDevice) -> None:
    """A unit is not updated during backward while a graph references it.

    The embedding is tied, since otherwise no graph references it, and its update would depend on its eviction.
    """
    model, reference = seeded(lambda: Stack(tied=True)), seeded(lambda: Stack(tied=True))
    config = engine_config(prefetch_bytes=0, **options)
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    with open_engine(model, config, late_device) as engine:
        for batch in TOKENS:
            losses = []
            for module in (engine, reference):
                loss = module(*batch)
                loss.backward(retain_graph=True)
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
            engine.step()
            if config.gradient_clipping > 0:
                nn.utils.clip_grad_norm_(reference.parameters(), config.gradient_clipping)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            del loss
        assert_nothing_leaked(engine)


def test_backward_after_the_update_it_would_need_the_past_for(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Stack), update="after_backward")
    loss = engine(*TOKENS[0])
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(LifetimeError, match="as they were before they were updated"):
        loss.backward()


def test_hooks_are_there_while_the_model_runs_and_no_longer(make_engine: OpenEngine) -> None:
    """Saved-tensor hooks are installed only during forwards, so other models and torch.func never see them."""
    seen = []

    class Looking(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.append(topmost_hooks(True) is not None)
            return super().forward(tokens, targets)

    engine = make_engine(seeded(Looking))
    for between in (lambda: None, lambda: engine(*TOKENS[0]), lambda: engine.backward(engine(*TOKENS[0]))):
        between()
        assert topmost_hooks(True) is None
    engine.step()
    assert seen == [True, True]
    x = torch.ones(3)
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(x), 2 * x)
    engine.close()
    assert "forward" not in engine.module.__dict__
