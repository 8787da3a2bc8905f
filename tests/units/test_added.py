"""Parameters added to a model while an engine has it are refused by name at the next training forward."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from infinity.errors import UsageError
from infinity.model.added import Additions
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Block, Stack, seeded, token_batches

BATCHES = token_batches(4)


def wrapped(model: Any) -> None:
    """Wrap the head as PEFT adds adapters."""
    head, adapter = model.head, nn.Linear(32, 61)
    model.head = nn.ModuleDict({"base": head, "adapter": adapter})
    model.head.forward = lambda x: head(x) + adapter(x)


def later(model: Any) -> None:
    """Add an empty module, run a forward, then add a layer to it."""
    model.extra = nn.Sequential()
    train_none(model)
    model.extra.append(nn.Linear(2, 2))


def train_none(model: Any) -> None:
    model(*BATCHES[0])


def normed(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[0].norm)


ADDED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter": (
        lambda model: setattr(model, "scale", nn.Parameter(torch.ones(2))),
        r"parameter scale \(Stack\)",
    ),
    "a frozen one": (
        lambda model: setattr(model.head, "scale", nn.Parameter(torch.ones(2), requires_grad=False)),
        r"parameter head\.scale \(Linear\)",
    ),
    "registered": (
        lambda model: model.blocks[1].register_parameter("gate", nn.Parameter(torch.ones(2))),
        r"blocks\.1\.gate \(Block\)",
    ),
    "a block": (lambda model: model.blocks.append(Block(32)), r"parameter blocks\.6\.norm\.weight \(LayerNorm\)"),
    "a block replaced": (lambda model: model.blocks.__setitem__(2, Block(32)), r"parameter blocks\.2\.norm\.weight"),
    "a head replaced": (lambda model: setattr(model, "head", nn.Linear(32, 61)), r"parameter head\.weight \(Linear\)"),
    "an adapter": (wrapped, r"parameter head\.adapter\.weight \(Linear\)"),
    "later": (later, r"parameter extra\.0\.weight \(Linear\)"),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_is_refused(name: str) -> None:
    add, said = ADDED[name]
    with open_engine(seeded(Stack), engine_config()) as engine:
        train(engine, BATCHES[:2])
        add(engine.module)
        for _ in range(2):
            with pytest.raises(UsageError, match=said) as caught:
                engine(*BATCHES[2])
        assert "Close the engine with engine.close(restore=True)" in str(caught.value)


def test_a_parameter_that_is_moved() -> None:
    """A managed parameter is refused under a new name, where the engine does not look for it."""
    with open_engine(seeded(Stack), engine_config()) as engine:
        model: Any = engine.module
        train(engine, BATCHES[:1])
        weight = next(parameter for name, parameter in model.head._parameters.items() if name == "weight")
        model.moved = nn.Module()
        model.moved.weight = weight
        with pytest.raises(UsageError, match=r"parameter moved\.weight"):
            engine(*BATCHES[1])


def tied(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def swapped(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


@pytest.mark.parametrize("change", [tied, swapped])
def test_a_module_in_the_place_of_another(change: Callable[[Any], None]) -> None:
    """The engine would save the old parameter under the name of the new one."""
    with open_engine(seeded(Stack), engine_config()) as engine:
        model: Any = engine.module
        train(engine, BATCHES[:1])
        blocks = list(model.blocks)
        change(model)
        with pytest.raises(UsageError, match=r"blocks\.\d\.norm\.weight of the model is now blocks\.\d\.norm\.weight"):
            engine(*BATCHES[1])
        for index, block in enumerate(blocks):
            model.blocks[index] = block
        train(engine, BATCHES[1:])


def allowed(model: Any) -> None:
    """Change the model without adding a parameter that the engine does not manage."""
    model.register_buffer("mask", torch.ones(3))
    model.blocks[0].dropout = nn.Dropout(0.0)
    model.head.cache = None
    model.blocks[0].register_parameter("bias", None)
    model.again = model.blocks[1]
    model.blocks[2] = nn.Sequential(model.blocks[2], nn.Identity())


def test_what_needs_no_parameters_is_allowed() -> None:
    outcomes = []
    for change in (lambda model: None, allowed):
        with open_engine(seeded(Stack), engine_config()) as engine:
            losses = train(engine, BATCHES[:2])
            change(engine.module)
            outcomes.append((losses + train(engine, BATCHES[2:]), len(engine.state_dict())))
    assert outcomes[0][0] == outcomes[1][0]


def test_training_goes_on_once_it_is_taken_away() -> None:
    with open_engine(seeded(Stack), engine_config()) as engine:
        expected = train(engine, BATCHES)
    with open_engine(seeded(Stack), engine_config()) as engine:
        model: Any = engine.module
        losses = train(engine, BATCHES[:2])
        model.extra = nn.Linear(2, 2)
        with torch.no_grad():
            engine(*BATCHES[2])  # allowed: nothing is trained
        with pytest.raises(UsageError):
            engine(*BATCHES[2])
        del model.extra
        assert losses + train(engine, BATCHES[2:]) == expected


def test_other_models_are_no_concern() -> None:
    """Additions to another engine's model are not reported, and engines leave no hooks behind, closed or dropped."""
    hooks = torch_module._global_module_registration_hooks, torch_module._global_parameter_registration_hooks
    before = [len(each) for each in hooks]
    first, second = (open_engine(seeded(Stack), engine_config()) for _ in range(2))
    train(first, BATCHES[:1])
    second.module.extra = nn.Linear(2, 2)
    train(first, BATCHES[1:2])
    with pytest.raises(UsageError, match=r"extra\.weight"):
        second(*BATCHES[0])
    first.close()
    first.module.extra = nn.Linear(2, 2)
    second.module.zero_grad()
    del first, second
    gc.collect()
    assert [len(each) for each in hooks] == before


def test_it_costs_nothing_where_nothing_was_added() -> None:
    additions = Additions(seeded(lambda: Stack(depth=100)))
    began = time.perf_counter()
    for _ in range(1000):
        additions.check()
    assert time.perf_counter() - began < 5e-3
    additions.close()
