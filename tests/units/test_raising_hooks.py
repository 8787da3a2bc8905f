"""Forward hooks that raise leave no unit held, and training continues unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from conftest import OpenEngine
from infinity.model.saved import topmost_hooks
from support.beside import MEMORY, NVME, EngineLoop, PlainLoop, assert_like, training
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import parameters_of
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(6)


class Trouble(Exception):
    """Raised by the hooks of these tests."""


def fails(*_: Any) -> None:
    raise Trouble


@contextmanager
def removed(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Install = Callable[[Any], Any]
INSTALLS: dict[str, Install] = {
    "pre": lambda model: model.layers[3].register_forward_pre_hook(fails),
    "pre, prepended": lambda model: model.layers[3].register_forward_pre_hook(fails, prepend=True),
    "pre of the root": lambda model: model.register_forward_pre_hook(fails, prepend=True),
    "pre with kwargs": lambda model: model.layers[3].register_forward_pre_hook(fails, with_kwargs=True, prepend=True),
    "global pre": lambda model: register_module_forward_pre_hook(fails),
    "forward": lambda model: model.layers[3].register_forward_hook(fails),
    "forward, prepended": lambda model: model.layers[3].register_forward_hook(fails, prepend=True),
    "forward of the root": lambda model: model.register_forward_hook(fails),
    "forward with kwargs": lambda model: model.layers[3].register_forward_hook(fails, with_kwargs=True),
    "forward, always called": lambda model: model.layers[3].register_forward_hook(fails, always_call=True),
    "global forward": lambda model: register_module_forward_hook(fails),
    "global forward, always called": lambda model: register_module_forward_hook(fails, always_call=True),
}
HOOKS = pytest.mark.parametrize("install", list(INSTALLS))
WHERE = pytest.mark.parametrize("place", [MEMORY, NVME], ids=["memory", "nvme"])


def footprint(engine: Any) -> dict[str, Any]:
    """Return counts and states that must not grow from failure to failure."""
    tracer, scope = engine.parts.schedule.trace, engine.parts.runner.scope
    return {
        "recorded": len(tracer._recorded),
        "traces": sorted(tracer._traces),
        "depth": scope.depth,
        "holds": [unit.pin_count for unit in engine.units],
        "hooks": topmost_hooks(True),
        "references": [unit.references for unit in engine.units],
    }


@WHERE
@HOOKS
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_training_goes_on(grad: bool, install: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    config = engine_config(**place)
    reference = PlainLoop(seeded(Linears), config)
    expected = training(BATCHES, evaluated)(reference)
    engine = make_engine(seeded(Linears), config)
    loop, model = EngineLoop(engine), engine.module
    seen = training(BATCHES[:3], evaluated)(loop)
    marks = []
    for _ in range(20):
        with removed(INSTALLS[install](model)), torch.set_grad_enabled(grad), pytest.raises(Trouble):
            model(*BATCHES[0])
        marks.append(footprint(engine))
    assert marks[2:] == marks[2:3] * 18
    assert marks[-1]["depth"] == 0 and not any(marks[-1]["holds"]) and marks[-1]["hooks"] is None
    seen += training(BATCHES[3:], lambda loop, number: evaluated(loop, number + 3))(loop)
    assert_like(seen, expected)
    assert_like(parameters_of(engine), {n: p.detach() for n, p in reference.model.named_parameters()})
    assert_nothing_leaked(engine)


def evaluated(loop: Any, number: int) -> Any:
    """Compute a loss without gradients, then edit a weight. Returns the loss and the weight."""
    with torch.no_grad():
        found = loop.model(*BATCHES[0]).item()
        loop.model.layers[4].weight.clamp_(-0.17, 0.17)
    return found, loop.model.layers[4].weight.detach().clone()


@WHERE
@HOOKS
def test_an_edit_before_the_hook_raises(install: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Edits before a hook raises are kept, and the failed step trains with them."""
    config = engine_config(**place)

    def story(loop: Any) -> list[Any]:
        seen: list[Any] = training(BATCHES[:2])(loop)
        for batch in BATCHES[2:]:
            with torch.no_grad():
                loop.model.layers[3].weight.mul_(0.9)
            with removed(INSTALLS[install](loop.model)), pytest.raises(Trouble):
                loop.model(*batch)
            seen += training([batch])(loop)
        return seen

    expected = story(PlainLoop(seeded(Linears), config))
    engine = make_engine(seeded(Linears), config)
    assert_like(story(EngineLoop(engine)), expected)
    assert_nothing_leaked(engine)


@WHERE
@pytest.mark.parametrize("where", ["full", "pre", "tensor"])
def test_backward_hooks_that_raise(where: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """Backward hooks that raise fail a step, which is dropped and repeated."""
    config = engine_config(**place, update="next_forward")
    expected = training(BATCHES)(PlainLoop(seeded(Linears), config))
    engine = make_engine(seeded(Linears), config)
    loop, model = EngineLoop(engine), engine.module
    seen = training(BATCHES[:2])(loop)
    for _ in range(10):
        layer: nn.Module = model.layers[3]
        if where == "full":
            handle = layer.register_full_backward_hook(fails)
        elif where == "pre":
            handle = layer.register_full_backward_pre_hook(fails)
        else:
            handle = layer.register_forward_hook(lambda module, args, out: out.register_hook(fails) and None)
        with removed(handle), pytest.raises(Trouble):
            engine.backward(model(*BATCHES[2]))
    seen += training(BATCHES[2:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)
