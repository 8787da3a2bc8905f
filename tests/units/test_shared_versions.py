"""Parameters that share autograd's count of edits, as slices of one tensor do, train as in a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from conftest import OpenEngine
from infinity.errors import LifetimeError
from support.lifetime import assert_trains_like_plain
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = vector_batches(6)
TOKENS = token_batches(6)
SCHEDULES = pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "next_forward"},
        {"update": "after_backward"},
        {"clip": 0.1},
        {"accumulation": 2},
        {"param": "cpu", "optim": "cpu"},
        {"param": "none", "optim": "none", "forward_updates": 0.5},
    ],
    ids=["backward", "forward", "after", "clip", "accumulation", "cpu", "device"],
)


def stacked_slices() -> nn.Module:
    """Layers that got the slices of one tensor by `load_state_dict(…, assign=True)`, as scanned models are loaded."""
    model = Linears(bias=True)
    layers = [dict(layer.named_parameters()) for layer in model.layers]
    stacks = {name: torch.stack([layer[name].detach() for layer in layers]) for name in layers[0]}
    state = {f"layers.{n}.{name}": stack[n] for name, stack in stacks.items() for n in range(len(layers))}
    model.load_state_dict(state, assign=True)
    return model


def views_of_a_flat_buffer() -> nn.Module:
    """Parameters of two kinds of layers, all of them views of one buffer."""
    model = Stack()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = flat[start : start + parameter.numel()].view(parameter.shape)
            setattr(module, name, nn.Parameter(values))
            start += parameter.numel()
    return model


def stacked_modules() -> nn.Module:
    """Layers whose weights are the rows of `torch.func.stack_module_state`."""
    model = Linears(bias=True)
    stacked, _ = torch.func.stack_module_state(list(model.layers))
    for name, values in stacked.items():
        for layer, row in zip(model.layers, values.detach().unbind(), strict=True):
            setattr(layer, name, nn.Parameter(row))
    return model


def frozen_slices() -> nn.Module:
    """Every other layer is frozen, beside trained ones in the same tensor."""
    model = stacked_slices()
    for layer in list(model.layers)[::2]:
        layer.requires_grad_(False)
    return model


def tiles() -> nn.Module:
    """Tiles that got the slices of whole layers by `load_state_dict(…, assign=True)`."""
    model = Linears(bias=True)
    assert infinity.nn.tile(model, 2048)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


MODELS = pytest.mark.parametrize(
    "make", [stacked_slices, views_of_a_flat_buffer, stacked_modules, frozen_slices, tiles]
)


@SCHEDULES
@MODELS
def test_trains_as_a_plain_loop(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """The update of one parameter during the backward of the others is no edit of the others."""
    batches = TOKENS if make is views_of_a_flat_buffer else BATCHES
    unit_size = 2500 if make is tiles else 20_000
    assert_trains_like_plain(make, batches, units=16 if make is tiles else 6, unit_size=unit_size, **options)


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_a_whole_step_at_once(update: str, make_engine: OpenEngine) -> None:
    """`train_batch` runs block by block, whose pending updates are no edits by the forward."""
    losses = []
    for make in (partial(Linears, bias=True), stacked_slices):
        engine = make_engine(seeded(make), accumulation=2, update=update)
        batches = iter(BATCHES)
        losses.append([engine.train_batch(batches, blocks=engine.module.layers).item() for _ in range(3)])
    assert losses[0] == losses[1]


@MODELS
def test_versions_count_as_in_a_plain_loop(make: Callable[[], nn.Module], make_engine: OpenEngine) -> None:
    """A step counts as one edit of each parameter, made by `engine.step()`."""
    batches = TOKENS if make is views_of_a_flat_buffer else BATCHES
    model = seeded(make)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = make_engine(seeded(make), unit_size=20_000)

    def versions(model: nn.Module) -> list[int]:
        return [parameter._version for parameter in model.parameters()]

    before = versions(model), versions(engine.module)
    for batch in batches[:3]:
        plain, loss = model(*batch), engine(*batch)
        plain.backward()
        engine.backward(loss)
        middle = versions(engine.module)
        optimizer.step()
        engine.step()
        moved = [now - then for now, then in zip(versions(engine.module), before[1], strict=True)]
        assert moved == [now - then for now, then in zip(versions(model), before[0], strict=True)]
        assert middle != versions(engine.module)


def test_an_edit_of_one_between_forward_and_backward_is_found(make_engine: OpenEngine) -> None:
    """The edit is an error as in plain PyTorch, whose version counter does not distinguish the slices."""
    plain = seeded(stacked_slices)
    loss = plain(*BATCHES[0])
    with torch.no_grad():
        plain.layers[2].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=re.escape("modified by an inplace operation")):
        loss.backward()
    engine = make_engine(seeded(stacked_slices))
    loss = engine(*BATCHES[0])
    with torch.no_grad():
        engine.module.layers[2].weight.mul_(0.5)
    with pytest.raises(LifetimeError, match="modified by an inplace operation"):
        engine.backward(loss)


@pytest.mark.filterwarnings("ignore:something still refers")
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("make", [stacked_slices, Linears])
def test_a_graph_of_before_the_step_is_refused(
    make: Callable[[], nn.Module], update: str, make_engine: OpenEngine
) -> None:
    """Its tensors were saved without the engine's hooks, so that PyTorch compares the versions."""
    engine = make_engine(seeded(make), update=update)
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = engine(*BATCHES[0])
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises((RuntimeError, LifetimeError), match="modified by an inplace operation"):
        loss.backward()
