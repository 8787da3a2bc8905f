"""`requires_grad` of parameters that were trained at construction may be changed at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.errors import UsageError
from support.beside import (
    LATE_TOO,
    MEMORY,
    NVME,
    PLACES,
    SCHEDULES,
    EngineLoop,
    PlainLoop,
    assert_like,
    assert_same_story as assert_same,
    training,
)
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.models import Linears, Stack, seeded, token_batches, vector_batches

BATCHES = vector_batches(8)


def layers(*numbers: int) -> Callable[[Any], list[nn.Parameter]]:
    return lambda model: [p for number in numbers for p in model.layers[number].parameters()]


def everything_but_the_last(model: Any) -> list[nn.Parameter]:
    return [p for layer in model.layers[:-1] for p in layer.parameters()]


def biases(model: Any) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def set_trained(parameters: list[nn.Parameter], trained: bool) -> None:
    for p in parameters:
        p.requires_grad_(trained)


def linears() -> Linears:
    return Linears(bias=True)


def freezing(which: Callable[[Any], list[nn.Parameter]], *, reads: bool) -> Any:
    """Return a story that freezes parameters in steps 2, 3, 5 and 6. reads: read them in between."""

    def story(loop: Any) -> list[Any]:
        seen: list[Any] = []
        for number, batch in enumerate(BATCHES):
            set_trained(which(loop.model), number not in (2, 3, 5, 6))
            if reads:
                seen += [p.detach().sum().item() for p in which(loop.model)]
                with torch.no_grad():
                    seen.append(loop.model(*batch).item())
            loss = loop.model(*batch)
            if reads:
                seen.append(float(sum(p.detach().square().sum() for p in loop.model.parameters())))
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
            if reads:
                seen += [p.detach().sum().item() for p in which(loop.model)]
        return seen

    return story


WHICH = pytest.mark.parametrize(
    "which", [layers(3), layers(0, 1), everything_but_the_last, biases], ids=["one", "first", "but the last", "biases"]
)


@LATE_TOO
@SCHEDULES
@WHICH
@pytest.mark.parametrize("reads", [False, True], ids=["", "read"])
def test_freeze_and_unfreeze(
    reads: bool, which: Callable[[Any], list[nn.Parameter]], update: str, place: dict[str, Any]
) -> None:
    assert_same(linears, freezing(which, reads=reads), place={**place, "update": update}, units=8)


@PLACES
@WHICH
@pytest.mark.parametrize("options", [{"clip": 0.3}, {"accumulation": 2}, {"weight_decay": 0.1, "lr": 1e-2}], ids=str)
def test_with_clipping_and_accumulation(
    options: dict[str, Any], which: Callable[[Any], list[nn.Parameter]], place: dict[str, Any]
) -> None:
    """Frozen parameters take no weight decay and no part in the norm."""
    assert_same(linears, freezing(which, reads=True), place={**place, **options}, units=8)


@PLACES
@pytest.mark.parametrize("master", ["remainder", "fp32"])
def test_in_bf16(master: str, place: dict[str, Any]) -> None:
    def story(loop: Any) -> list[float]:
        seen = []
        for number, (x, y) in enumerate(BATCHES):
            set_trained(layers(2, 3)(loop.model), number not in (2, 3, 6))
            loss = loop.model(x.bfloat16(), y)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    place = {**place, **({"unit_size": 2048} if "unit_size" in place else {})}
    assert_same(linears, story, place=place, units=8, bf16=True, master=master, tolerance=1e-2)


@PLACES
@pytest.mark.parametrize("reentrant", [True, False])
def test_with_checkpoints(reentrant: bool, place: dict[str, Any]) -> None:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return out

    def story(loop: Any) -> list[float]:
        seen = []
        for number, batch in enumerate(token_batches(6)):
            loop.model.blocks[number % 6].requires_grad_(False)
            loop.model.blocks[(number - 2) % 6].requires_grad_(True)
            loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    assert_same(lambda: Stack(run=run), story, place={**place, "unit_size": 100_000}, units=8)


@PLACES
def test_between_forward_and_backward(place: dict[str, Any]) -> None:
    """Parameters frozen between forward and backward receive no gradient; the graph stays, as in PyTorch."""

    def story(loop: Any) -> list[float]:
        seen = []
        for number, batch in enumerate(BATCHES[:5]):
            loss = loop.model(*batch)
            if number == 2:
                set_trained(layers(3)(loop.model), False)
                set_trained(layers(3)(loop.model), True)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
        return seen

    assert_same(linears, story, place=place, units=8)


@PLACES
def test_a_frozen_parameter_that_is_edited(place: dict[str, Any]) -> None:
    def story(loop: Any) -> list[Any]:
        set_trained(layers(2, 3)(loop.model), False)

        def extra(loop: Any, number: int) -> Any:
            with torch.no_grad():
                loop.model.layers[2].weight.mul_(0.95)
                loop.model.layers[3].weight.data.add_(0.01)
            if number == 3:
                set_trained(layers(2, 3)(loop.model), True)
            return loop.model.layers[2].weight.detach().clone()

        return training(BATCHES, extra)(loop)

    assert_same(linears, story, place=place, units=8)


# -- frozen when the engine was made ---------------------------------------------------------------------------------


def frozen_base() -> Linears:
    model = Linears(bias=True)
    for layer in model.layers[2:4]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("place", [MEMORY, NVME], ids=["memory", "nvme"])
@pytest.mark.parametrize("how", ["module", "parameter", "attribute"])
@pytest.mark.parametrize("part", ["whole", "part"])
def test_unfreezing_what_was_frozen_at_the_start(
    part: str, how: str, place: dict[str, Any], make_engine: OpenEngine
) -> None:
    """Every forward raises UsageError while a parameter is unfrozen; once it is frozen again, training goes on."""
    config = engine_config(**place)
    expected = training(BATCHES)(PlainLoop(seeded(frozen_base), config))
    engine = make_engine(seeded(frozen_base), config)
    loop, model = EngineLoop(engine), engine.module
    seen: list[Any] = training(BATCHES[:4])(loop)
    layer = model.layers[2]
    for _ in range(3):
        if how == "module":
            layer.requires_grad_(True)
        elif how == "parameter":
            layer.weight.requires_grad_()
        else:
            layer.weight.requires_grad = True
        with pytest.raises(UsageError, match=r"layers\.2\.weight was frozen when the engine was made"):
            layer(BATCHES[0][0]) if part == "part" else engine(*BATCHES[0])
        layer.requires_grad_(False)
    seen += training(BATCHES[4:])(loop)
    assert_like(seen, expected)
    assert_nothing_leaked(engine)


class Scaled(nn.Module):
    """(batch, 32) → the same, by frozen scales of a ParameterDict, whose own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.scales = nn.ParameterDict({"one": torch.ones(32), "other": torch.ones(32)}).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.scales["one"] + self.scales["other"])


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, targets)


@PLACES
@pytest.mark.parametrize("used", ["in forward", "in the loop"])
def test_unfreezing_what_no_module_holds(used: str, place: dict[str, Any], make_engine: OpenEngine) -> None:
    """The error is raised where the parameter is used, in any code."""
    place = {**place, **({"unit_size": 64} if "unit_size" in place else {})}
    engine = make_engine(seeded(Scales), **place)
    scale = engine.module.layers[1].scales["other"]
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    scale.requires_grad_(True)
    with pytest.raises(UsageError, match=r"layers\.1\.scales\.other was frozen when the engine was made"):
        engine(*BATCHES[1]) if used == "in forward" else scale.square().sum()
    scale.requires_grad_(False)
    engine.backward(engine(*BATCHES[1]))
    engine.step()


@PLACES
def test_unfreezing_for_a_forward_without_gradients(place: dict[str, Any], make_engine: OpenEngine) -> None:
    """A reference pass of peft's `set_adapter` does so: it trains nothing, and the next forward has frozen it again."""
    config = engine_config(**place)
    expected = training(BATCHES)(PlainLoop(seeded(frozen_base), config))
    engine = make_engine(seeded(frozen_base), config)
    loop, layer = EngineLoop(engine), engine.module.layers[2]
    seen: list[Any] = []
    for number in range(len(BATCHES)):
        layer.requires_grad_(True)
        with torch.no_grad():
            reference = engine(*BATCHES[number])
        layer.requires_grad_(False)
        new = training(BATCHES[number : number + 1])(loop)
        assert new[0] == reference.item()
        seen += new
    assert_like(seen, expected)
