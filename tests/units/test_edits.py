"""Edits of parameters take effect as in plain PyTorch, at any place and in any way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.beside import LATE_TOO, PLACES, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(5)
Edit = Callable[[torch.Tensor], None]


def in_place(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.9).clamp_(-0.2, 0.2)


def by_data(p: torch.Tensor) -> None:
    p.data.mul_(0.9)
    p.data.clamp_(-0.2, 0.2)


def by_detach(p: torch.Tensor) -> None:
    p.detach().mul_(0.9).clamp_(-0.2, 0.2)


def by_numpy(p: torch.Tensor) -> None:
    if p.dtype == torch.bfloat16:
        values = p.detach().view(torch.int16).numpy()
        values[values > 0x3E00] = 0x3E00
        return
    values = p.detach().numpy()
    values *= 0.9
    np.clip(values, -0.2, 0.2, out=values)


def by_item(p: torch.Tensor) -> None:
    with torch.no_grad():
        p[2, 3] = 0.125
        p[5].copy_(p[4])


def by_copy(p: torch.Tensor) -> None:
    p.data.copy_(p.data.clamp(-0.2, 0.2))


def by_assignment(p: torch.Tensor) -> None:
    p.data = p.data.clamp(-0.2, 0.2)


def by_set(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.set_(p.detach().clamp(-0.2, 0.2))


def by_view(p: torch.Tensor) -> None:
    p.detach().view(-1)[::3].mul_(0.5)


def by_out(p: torch.Tensor) -> None:
    with torch.no_grad():
        torch.clamp(p.detach(), -0.2, 0.2, out=p.data)


def by_foreach(p: torch.Tensor) -> None:
    torch._foreach_mul_([p.detach()], 0.9)


def by_lerp(p: torch.Tensor) -> None:
    p.data.lerp_(torch.full_like(p, 0.05), 0.1)


EDITS = [
    in_place,
    by_data,
    by_detach,
    by_numpy,
    by_item,
    by_copy,
    by_assignment,
    by_set,
    by_view,
    by_out,
    by_foreach,
    by_lerp,
]


class Edited(nn.Module):
    """A layer that edits its own weight in its forward, while training."""

    def __init__(self, edit: Edit | None = None, width: int = 32, frozen: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=not frozen)
        self.bias = nn.Parameter(torch.zeros(width))
        self.edit = edit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None and self.training:
            self.edit(self.weight)
        return x + 0.3 * torch.tanh(F.linear(x, self.weight, self.bias))


class Net(nn.Module):
    """parent: edits weights of its layers before it calls them."""

    def __init__(self, edit: Edit | None = None, parent: Edit | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Edited(edit, frozen=frozen) for _ in range(6))
        self.parent = parent

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.parent is not None:
            for layer in self.layers:
                self.parent(layer.weight)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), targets.float())


def weight_of(loop: Any, number: int) -> torch.Tensor:
    value: torch.Tensor = loop.model.layers[2].weight.detach().clone()
    return value


@PLACES
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("edit", EDITS)
def test_in_the_owners_forward(edit: Edit, frozen: bool, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(edit, frozen=frozen), training(BATCHES, weight_of), place=place, units=6)


@LATE_TOO
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("edit", [in_place, by_data, by_numpy, by_assignment, by_out])
def test_in_a_parents_forward(edit: Edit, frozen: bool, place: dict[str, Any]) -> None:
    assert_same_story(lambda: Net(parent=edit, frozen=frozen), training(BATCHES, weight_of), place=place, units=6)


BF16 = [(x.bfloat16(), y.bfloat16()) for x, y in BATCHES]


@PLACES
@pytest.mark.parametrize("master", ["remainder", "fp32"])
@pytest.mark.parametrize("edit", [by_data, by_numpy, by_item, by_assignment])
@pytest.mark.parametrize("where", ["owner", "parent", "loop"])
def test_masters_follow_in_bf16(edit: Edit, where: str, master: str, place: dict[str, Any]) -> None:
    def extra(loop: Any, number: int) -> Any:
        if where == "loop":
            edit(loop.model.layers[3].weight)
        return None

    place = {**place, **({"unit_size": 2048} if "unit_size" in place else {})}
    make = lambda: Net(edit if where == "owner" else None, edit if where == "parent" else None)  # noqa: E731
    assert_same_story(
        make, training(BF16, extra), place=place, units=6, bf16=True, master=master, lr=1e-2, tolerance=2e-2
    )


@LATE_TOO
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("edit", EDITS)
def test_through_kept_parameters_in_the_loop(edit: Edit, update: str, place: dict[str, Any]) -> None:
    """Parameters kept before the first step are edited after every step, and again before the next forward."""

    def story(loop: Any) -> Any:
        kept = [layer.weight for layer in loop.model.layers]

        def extra(loop: Any, number: int) -> torch.Tensor:
            for p in kept[1:4]:
                edit(p)
            edit(kept[number])
            return kept[number].detach().clone()

        return training(BATCHES, extra)(loop)

    assert_same_story(Net, story, place={**place, "update": update}, units=6)


# -- in hooks --------------------------------------------------------------------------------------------------------


@PLACES
@pytest.mark.parametrize("edit", [in_place, by_data, by_numpy, by_assignment])
@pytest.mark.parametrize("prepend", [False, True])
def test_in_a_pre_forward_hook(edit: Edit, prepend: bool, place: dict[str, Any]) -> None:
    def story(loop: Any) -> Any:
        for layer in loop.model.layers[::2]:
            layer.register_forward_pre_hook(lambda module, args: edit(module.weight), prepend=prepend)
        return training(BATCHES, weight_of)(loop)

    assert_same_story(Net, story, place=place, units=6)


@PLACES
@pytest.mark.parametrize("edit", [by_data, by_numpy])
def test_in_a_forward_hook_without_gradients(edit: Edit, place: dict[str, Any]) -> None:
    """A calibration pass without gradients edits each layer after its forward."""

    def story(loop: Any) -> Any:
        seen: list[Any] = [training(BATCHES[:2])(loop)]
        handles = [
            layer.register_forward_hook(lambda module, args, out: edit(module.weight)) for layer in loop.model.layers
        ]
        with torch.no_grad():
            seen += [loop.model(*batch).item() for batch in BATCHES[:3]]
        for handle in handles:
            handle.remove()
        return [seen, training(BATCHES[2:], weight_of)(loop)]

    assert_same_story(Net, story, place=place, units=6)


@PLACES
@pytest.mark.parametrize("number", [0, 5])
def test_in_a_tensor_hook_of_backward(number: int, place: dict[str, Any]) -> None:
    """The hook of an output's gradient edits another layer, which backward no longer needs or never needed."""

    def story(loop: Any) -> Any:
        layers = loop.model.layers

        def edit(bias: torch.Tensor) -> None:
            bias.data.add_(0.01)

        def forward_hook(module: Any, args: Any, out: torch.Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda gradient: edit(layers[5].bias))

        layers[number].register_forward_hook(forward_hook)
        return training(BATCHES, lambda loop, n: layers[5].bias.detach().clone())(loop)

    assert_same_story(Net, story, place={**place, "update": "next_forward"}, units=6)


class EditsInBackward(torch.autograd.Function):
    """Moves a codebook towards its inputs, in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), book.detach()).argmin(1)
        ctx.save_for_backward(x, nearest)
        ctx.book = book
        return x + (book.detach()[nearest] - x).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, nearest = ctx.saved_tensors
        ctx.book.data[nearest] = 0.9 * ctx.book.data[nearest] + 0.1 * x
        return gradients[0], None


class Codebook(nn.Module):
    """Quantises by a codebook (a frozen parameter) that follows its inputs. mode: the place where it is moved."""

    def __init__(self, mode: str, width: int = 32, size: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.book = nn.Parameter(torch.randn(size, width), requires_grad=False)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.up(x))
        if self.mode == "backward":
            out: torch.Tensor = EditsInBackward.apply(x, self.book)
            return out
        nearest = torch.cdist(x.detach(), self.book).argmin(1)
        found = self.book[nearest].detach().clone()
        if self.training:
            with torch.no_grad():
                if self.mode == "index_copy":
                    self.book.index_copy_(0, nearest[:1], self.book[nearest[:1]].lerp(x[:1].detach(), 0.1))
                elif self.mode == "moving average":
                    self.book.data.mul_(0.99).add_(x.detach().mean(0), alpha=0.01)
                else:
                    self.book.detach().numpy()[nearest[0].item()] += 0.01
        return x + (found - x).detach()


class Quantised(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Codebook(mode) for _ in range(5))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


@LATE_TOO
@pytest.mark.parametrize("mode", ["index_copy", "moving average", "numpy", "backward"])
def test_codebooks(mode: str, place: dict[str, Any]) -> None:
    def book(loop: Any, number: int) -> Any:
        with torch.no_grad():  # an evaluation between steps must see the edits, and makes none itself
            loop.model.eval()
            seen = loop.model(*BATCHES[0]).item()
            loop.model.train()
        return loop.model.layers[1].book.detach().clone(), seen

    assert_same_story(lambda: Quantised(mode), training(BATCHES, book), place=place, units=5)


@PLACES
@pytest.mark.filterwarnings("ignore:something still refers")
def test_weights_that_are_normalised_before_and_after_every_step(place: dict[str, Any]) -> None:
    """Functions over lists of parameters edit all of them at once."""

    def extra(loop: Any, number: int) -> float:
        parameters = list(loop.model.parameters())
        with torch.no_grad():
            for p in parameters:
                if p.dim() > 1:
                    p.copy_(F.normalize(p, dim=1))
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 0.99, parameters)
        return float(sum(p.detach().double().norm() for p in parameters))

    assert_same_story(Net, training(BATCHES, extra), place=place, units=6)
