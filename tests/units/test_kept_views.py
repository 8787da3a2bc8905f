"""Gradients through views of parameters that are kept while their units come and go: autograd finds the place of such a
view in its parameter by the layout of both, anew after every edit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.beside import LATE_TOO, SCHEDULES, assert_same_story, training
from support.models import vector_batches

pytestmark = pytest.mark.filterwarnings("ignore:something still refers")
BATCHES = vector_batches(5)
VIEWS: dict[str, Callable[[nn.Linear], torch.Tensor]] = {
    "flat": lambda layer: layer.weight.view(-1),
    "transposed": lambda layer: layer.weight.t(),
    "rows": lambda layer: layer.weight[3:5],
    "bias": lambda layer: layer.bias.view(4, 8),
    "diagonal": lambda layer: layer.weight.diagonal(),
    "view of a view": lambda layer: layer.weight.t()[1:].unsqueeze(0),
}


class Layers(nn.Module):
    """(batch, 32) and targets of that shape → mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, targets)


def penalised(view: Callable[[nn.Linear], torch.Tensor], *, first: bool) -> Callable[[Any], list[float]]:
    """A story whose loop adds a penalty of views that it made once, before the forward or after it."""

    def story(loop: Any) -> list[float]:
        kept = [view(layer) for layer in loop.model.layers]
        seen = []
        for batch in BATCHES:
            penalty = 0.1 * sum(each.square().sum() for each in kept) if first else 0.0
            loss = loop.model(*batch) + penalty
            if not first:
                loss = loss + 0.1 * sum(each.square().sum() for each in kept)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    return story


@LATE_TOO
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("first", [True, False], ids=["before forward", "after forward"])
def test_a_loop_keeps_views(view: str, first: bool, place: dict[str, Any]) -> None:
    assert_same_story(Layers, penalised(VIEWS[view], first=first), place=place, units=6, leaks=True)


@SCHEDULES
@pytest.mark.parametrize("view", ["flat", "bias"])
def test_in_every_schedule_with_micro_batches(view: str, update: str) -> None:
    place = {"unit_size": 4096, "prefetch_bytes": 0, "update": update, "accumulation": 2}
    assert_same_story(Layers, penalised(VIEWS[view], first=False), place=place, units=6, leaks=True)


class Lender(nn.Module):
    """(batch, 32) → the same. Its first forward passes a view of its weight to the layer after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.lent: torch.Tensor | None = None
        self.borrowed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.lent is None:
            self.lent = self.linear.weight.t()
        y = torch.tanh(self.linear(x))
        return x + (y if self.borrowed is None else y @ self.borrowed[:, 1:].repeat(1, 2)[:, :32])


class Lenders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lender() for _ in range(6))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer, later in zip(self.layers, [*self.layers[2:], None, None], strict=True):
            x = layer(x)
            if later is not None:
                later.borrowed = layer.lent
        return F.mse_loss(x, targets)


@LATE_TOO
def test_a_module_keeps_a_view_of_anothers_parameter(place: dict[str, Any]) -> None:
    assert_same_story(Lenders, training(BATCHES), place=place, units=6, leaks=True)


class Unused(nn.Module):
    """(batch, 32) → the same. Its weight is used through a view made in a forward without gradients, and gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.linear = nn.Linear(32, 32)
        self.flat: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flat is None:
            self.flat = self.weight.view(-1)
        return x + torch.tanh(self.linear(x @ self.flat.view(32, 32)))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unused() for _ in range(4))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return F.mse_loss(x, targets)


@LATE_TOO
def test_a_parameter_without_a_gradient_counts_no_edit(place: dict[str, Any]) -> None:
    """PyTorch refuses a view made without gradients once its parameter was edited, which the update of others in its
    unit is not.
    """
    assert_same_story(Recomputed, training(BATCHES), place=place, units=4, leaks=True)


class Returning(nn.Module):
    """x → the same, or the function's result for its weight."""

    def __init__(self, returned: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self._returned = returned

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return self._returned(self.weight) if x is None else x + torch.tanh(x @ self.weight)


class Codebooks(nn.Module):
    """Uses the results of its layers, and edits them with `decay`."""

    def __init__(self, returned: Callable[[torch.Tensor], torch.Tensor], decay: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning(returned) for _ in range(6))
        self.decay = decay

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.decay != 1 else []:
            with torch.no_grad():
                layer().mul_(self.decay)
        for layer, later in zip(self.layers, [*self.layers[2:], *self.layers[:2]], strict=True):
            x = layer(x) + later().square().mean()
        return F.mse_loss(x, targets)


RETURNED = pytest.mark.parametrize(
    "returned",
    [lambda w: w, lambda w: w.data, lambda w: w.detach()],
    ids=["the parameter", "its data", "detached"],
)


@LATE_TOO
@RETURNED
def test_a_loop_edits_what_a_module_returns(returned: Callable[..., torch.Tensor], place: dict[str, Any]) -> None:
    def story(loop: Any) -> list[float]:
        kept, seen = loop.model.layers[0](), []
        for batch in BATCHES:
            loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            with torch.no_grad():
                for layer in loop.model.layers[1:4]:
                    layer().mul_(0.5)
                kept.add_(0.01)
            seen += [loss.item(), kept.sum().item()]
        return seen

    assert_same_story(lambda: Codebooks(returned), story, place=place, units=6, leaks=True)


@LATE_TOO
@RETURNED
def test_a_forward_edits_what_a_module_returns(returned: Callable[..., torch.Tensor], place: dict[str, Any]) -> None:
    assert_same_story(lambda: Codebooks(returned, 0.9), training(BATCHES), place=place, units=6, leaks=True)


def test_a_module_returns_the_parameter_itself() -> None:
    def story(loop: Any) -> list[bool]:
        first = loop.model.layers[0]
        return [first() is first.weight, first().is_leaf]

    assert_same_story(lambda: Codebooks(lambda w: w), story, place={"unit_size": 4096, "prefetch_bytes": 0}, units=6)
