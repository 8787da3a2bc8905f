"""Saved-tensor hooks that a forward opens, over weights of its own module and of other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from infinity.model.saved import topmost_hooks
from support.beside import LATE_TOO, NVME, PLACES, SCHEDULES, assert_same_story, training
from support.models import vector_batches

BATCHES = vector_batches(4)


def listed() -> Any:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    return saved_tensors_hooks(pack, lambda number: kept[number])


class Pushed:
    """Hooks pushed without a context manager, as code that overlaps copies with computation does."""

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: [t], lambda packed: packed[0])

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


HOOKS: dict[str, Callable[[], Any]] = {
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "list": listed,
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "detach": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "half": lambda: saved_tensors_hooks(lambda t: (t.half(), t.dtype), lambda packed: packed[0].to(packed[1])),
    "pushed": Pushed,
}
EACH = pytest.mark.parametrize("hooks", list(HOOKS))


class Layer(nn.Module):
    """A layer whose products save its parameters themselves, not views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(x @ self.weight) * self.scale


Read = Callable[[Any], list[torch.Tensor]]
WAYS: dict[str, Read] = {
    "attribute": lambda layer: [layer.weight, layer.scale],
    "parameters": lambda layer: list(layer.parameters()),
    "named": lambda layer: [p for _, p in layer.named_parameters()],
    "dict": lambda layer: [layer._parameters["weight"], *(p for n, p in layer._parameters.items() if n == "scale")],
}


def used(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    weight, scale = weights
    return torch.tanh(x @ (weight * weight)) * scale + F.linear(x, weight) + weight.square().mean()


class Reading(nn.Module):
    """Six layers; the forward uses weights of a layer under hooks that it opens.

    read: function that reads a layer's parameters. since: "init", "before" the hooks are opened or "under" them.
    after: the layer's own forward has run, and so has the next one's.
    """

    def __init__(self, hooks: Callable[[], Any], read: Read, since: str, after: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.hooks, self.read, self.since, self.after = hooks, read, since, after
        self.kept = [read(layer) for layer in self.layers]

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.after:
                x = layer(x)
            weights = self.kept[number] if self.since == "init" else self.read(layer) if self.since == "before" else []
            with self.hooks():
                x = x + 0.1 * used(weights or self.read(layer), x)
            if not self.after:
                x = layer(x)
        return F.mse_loss(x, targets)


@PLACES
@EACH
@pytest.mark.parametrize("after", [True, False], ids=["after its forward", "before its forward"])
@pytest.mark.parametrize("since", ["under", "before", "init"])
def test_weights_of_another_module(hooks: str, since: str, after: bool, place: dict[str, Any]) -> None:
    make = partial(Reading, HOOKS[hooks], WAYS["attribute"], since, after)
    assert_same_story(make, training(BATCHES), place=place, units=6)


@LATE_TOO
@SCHEDULES
@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_to_read_them(way: str, update: str, place: dict[str, Any]) -> None:
    make = partial(Reading, HOOKS["identity"], WAYS[way], "under", True)
    assert_same_story(make, training(BATCHES), place={**place, "update": update}, units=6)


@PLACES
@EACH
@pytest.mark.parametrize("since", ["under", "before", "init"])
def test_weights_of_the_module_itself(hooks: str, since: str, place: dict[str, Any]) -> None:
    class Own(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.weight, self.scale]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.kept if since == "init" else [self.weight, self.scale] if since == "before" else []
            with HOOKS[hooks]():
                return x + 0.3 * used(weights or [*self.parameters()], x)

    assert_same_story(lambda: _Chain(Own), training(BATCHES), place=place, units=6)


class _Chain(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, targets)


class Lent(nn.Module):
    """A module without parameters of its own, whose forward reads those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.one(x))
        return x + y + sum(p.square().mean() for p in self.one.parameters()) * self.other.scale


@PLACES
@EACH
@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_hooks_around_a_nested_module(hooks: str, nested: bool, place: dict[str, Any]) -> None:
    class Outer(Lent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with HOOKS[hooks]():
                if nested:
                    with HOOKS["identity"]():
                        x = x + x * self.one.scale
                x = super().forward(x)
            return x * self.other.scale

    assert_same_story(lambda: _Chain(Outer, 3), training(BATCHES), place=place, units=6)


@PLACES
@EACH
def test_hooks_around_the_whole_loop_and_in_a_forward(hooks: str, place: dict[str, Any]) -> None:
    def story(loop: Any) -> Any:
        with HOOKS[hooks]():
            return training(BATCHES)(loop)

    make = partial(Reading, HOOKS["identity"], WAYS["parameters"], "before", True)
    assert_same_story(make, story, place=place, units=6)


@PLACES
@pytest.mark.parametrize("hooks", ["identity", "list", "save_on_cpu", "detach"])
@pytest.mark.parametrize("around", [True, False], ids=["hooks in the checkpoint", "checkpoint in the hooks"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_with_checkpoints(hooks: str, around: bool, reentrant: bool, place: dict[str, Any]) -> None:
    class Inside(Lent):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            if not around:
                return super().forward(x)
            with HOOKS[hooks]():
                return super().forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if around:
                return checkpoint(self.run, x, use_reentrant=reentrant)  # type: ignore[no-any-return]
            with HOOKS[hooks]():
                return checkpoint(self.run, x, use_reentrant=reentrant) * self.one.scale  # type: ignore[no-any-return]

    def story(loop: Any) -> Any:
        for x, _ in BATCHES:
            x.requires_grad_()
        try:
            return training(BATCHES)(loop)
        finally:
            for x, _ in BATCHES:
                x.requires_grad_(False)
                x.grad = None

    assert_same_story(lambda: _Chain(Inside, 3), story, place=place, units=6)


@PLACES
@pytest.mark.parametrize("hooks", ["identity", "list", "detach"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_under_hooks_of_later_steps(hooks: str, backend: str, place: dict[str, Any]) -> None:
    """A graph that was compiled without hooks is used under them."""

    class Compiled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.part = torch.compile(self.product, backend=backend)

        def product(self, x: torch.Tensor) -> torch.Tensor:
            return 0.3 * torch.tanh(x @ self.weight) * self.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            with HOOKS[hooks]() if self.calls > 1 else nullcontext():
                return x + self.part(x)

    torch._dynamo.reset()
    assert_same_story(lambda: _Chain(Compiled), training(BATCHES), place=place, units=6)


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    assert topmost_hooks(True) is None


@pytest.mark.parametrize("bf16", [False, True])
def test_second_derivatives(bf16: bool) -> None:
    """Backward records a graph, and the graph keeps references, too."""

    class Penalised(Reading):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            loss = super().forward(x, targets)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.square().sum()

    make = partial(Penalised, HOOKS["identity"], WAYS["parameters"], "before", True)
    story = training([(x.bfloat16(), t.bfloat16()) for x, t in BATCHES] if bf16 else BATCHES)
    assert_same_story(make, story, place=NVME, units=6, bf16=bf16, tolerance=2e-2 if bf16 else 2e-5)
