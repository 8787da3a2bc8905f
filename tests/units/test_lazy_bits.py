"""Saved weights keep properties that their memory does not show: conjugate and negative bits, complex views,
subclasses.
"""

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
Mix = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Mixed(nn.Module):
    """(batch, width) → the same, by a weight (width, width) that `mix` uses."""

    def __init__(self, mix: Mix, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(self.mix(x, self.weight))


class Net(nn.Module):
    def __init__(self, mix: Mix, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed(mix) for _ in range(depth))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


def as_complex(weight: torch.Tensor) -> torch.Tensor:
    """(n, m) → complex (n, m / 2)"""
    return torch.view_as_complex(weight.view(weight.shape[0], -1, 2))


def conjugated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([(x.to(torch.complex64) @ as_complex(weight).conj()).real, x[:, ::2]], 1)


def adjoint(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = (x[:, ::2].to(torch.complex64) * (1 + 0.5j)) @ as_complex(weight).mH
    return out.real + out.imag


def imaginary_of_conjugate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    part = as_complex(weight).conj().imag
    assert part.is_neg()
    return torch.cat([x @ part, x @ part.exp()], 1)


def real_of_conjugate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([x @ as_complex(weight).conj().real, x[:, ::2]], 1)


def negated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ torch._neg_view(weight)


def negated_transpose(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, torch._neg_view(weight).t()) * torch._neg_view(weight)[0]


def conjugate_of_conjugate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x[:, ::2].to(torch.complex64) @ as_complex(weight).conj().t().conj()
    return out.real * out.imag


def product_of_both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    w = as_complex(weight)
    return x * (w * w.conj()).real.sum(1)


class Tagged(torch.Tensor):
    """A subclass that adds nothing."""


class Counted(torch.Tensor):
    """A subclass with an attribute, which results do not inherit."""

    tag: str


def subclassed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight.as_subclass(Tagged)).as_subclass(torch.Tensor)


def subclassed_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight.t().as_subclass(Tagged) + x * weight[1].as_subclass(Tagged)).as_subclass(torch.Tensor)


def subclassed_with_a_field(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    counted = weight.detach().as_subclass(Counted)
    counted.tag = "kept"
    return (x @ counted + x @ weight).as_subclass(torch.Tensor)


class SavesSubclass(torch.autograd.Function):
    """Saves a tensor of a subclass and checks its type and attribute in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        counted = weight.detach().as_subclass(Counted)
        counted.tag = "kept"
        ctx.save_for_backward(x, counted)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, counted = ctx.saved_tensors
        assert type(counted) is Counted and counted.tag == "kept"
        plain = counted.as_subclass(torch.Tensor)
        return gradients[0] @ plain.t(), x.t() @ gradients[0]


def saves_a_subclass(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return SavesSubclass.apply(x, weight)


def bits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute with the weight's memory viewed as integers, which gives its signs."""
    signs = 1 - 2 * (weight.detach().view(torch.int32) < 0).to(x.dtype)
    return x @ (weight * signs)


def strided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute with strided views that overlap, repeat and skip elements."""
    band = weight.as_strided((32, 32), (16, 1))
    return x @ band + x * weight[:, 3].expand(32) + x @ weight.diagonal().expand(32, 32)


MIXES = [
    conjugated,
    adjoint,
    imaginary_of_conjugate,
    real_of_conjugate,
    negated,
    negated_transpose,
    conjugate_of_conjugate,
    product_of_both,
    subclassed,
    subclassed_view,
    subclassed_with_a_field,
    saves_a_subclass,
    bits,
    strided,
]
KEEPS = {subclassed, subclassed_view, subclassed_with_a_field, saves_a_subclass}


@LATE_TOO
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.filterwarnings("ignore:something still refers")
def test_saved_weights_are_restored_as_they_were(mix: Mix, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(mix), training(BATCHES), place=place, units=6)


@SCHEDULES
@pytest.mark.parametrize("mix", [adjoint, imaginary_of_conjugate])
def test_in_every_schedule(mix: Mix, update: str) -> None:
    place = {"unit_size": 4096, "prefetch_bytes": 0, "update": update, "accumulation": 2}
    assert_same_story(lambda: Net(mix), training(BATCHES[:4]), place=place, units=6)


@PLACES
@pytest.mark.parametrize("mix", [conjugated, adjoint, imaginary_of_conjugate, negated, subclassed])
@pytest.mark.filterwarnings("ignore:something still refers")
def test_double_backward(mix: Mix, place: dict[str, Any]) -> None:
    """Double backward, through a gradient's norm, works for weights with lazy bits."""

    def story(loop: Any) -> list[float]:
        seen = []
        for x, targets in BATCHES[:4]:
            x = x.clone().requires_grad_()
            loss = loop.model(x, targets)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            total = loss + gradient.square().sum()
            loop.backward(total)
            loop.step()
            seen.append(total.item())
        return seen

    place = {**place, "update": "next_forward"}
    assert_same_story(lambda: Net(mix), story, place=place, units=6)


class Rotated(nn.Module):
    """(batch, width) → the same, through a frozen complex matrix and a trained real one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(width // 2, width // 2, dtype=torch.complex64) / 4, requires_grad=False)
        self.scale = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.scale(x).view(x.shape[0], -1, 2))
        z = z @ self.turn.mH + (z * self.turn.conj()[0]) @ self.turn
        return x + torch.tanh(torch.view_as_real(z).flatten(1) + torch.cat([z.real @ self.turn.imag] * 2, 1))


class Rotations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotated() for _ in range(4))

    forward = Net.forward


@LATE_TOO
def test_frozen_complex_parameters(place: dict[str, Any]) -> None:
    assert_same_story(Rotations, training(BATCHES), place=place, units=4)
