"""Views that were taken before parameters are replaced in their tiers: as in a plain loop, they show the new values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine.training import TrainingEngine
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded, token_batches

pytestmark = pytest.mark.filterwarnings("ignore:something still refers")
BATCHES = token_batches(2)
VIEWS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "flat": lambda parameter: parameter.view(-1),
    "detached": lambda parameter: parameter.detach(),
    "element": lambda parameter: parameter.flatten()[3],
}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "host": {"param": "cpu", "optim": "cpu"},
    "device": {"param": "none", "optim": "none"},
    "bf16": {"bf16": True},
}


def model(seed: int) -> Stack:
    return seeded(Stack, seed=seed)


def step(engine: TrainingEngine) -> None:
    engine.backward(engine(*BATCHES[0]))
    engine.step(client_state={"next": 1})


def assert_shown(engine: Any, view: Callable[[nn.Parameter], torch.Tensor], change: Callable[[], object]) -> None:
    """Views of all parameters, taken before `change`, show the values after it, and had others before."""
    kept = {name: view(parameter) for name, parameter in engine.module.named_parameters()}
    before = {name: value.clone() for name, value in kept.items()}
    change()
    shown = {name: value.clone() for name, value in kept.items()}
    assert any(not torch.equal(before[name], value) for name, value in shown.items())
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(shown[name], view(parameter)), name
    for name, value in engine.state_dict().items():
        if name in shown:
            assert torch.equal(shown[name], view(nn.Parameter(value))), name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("only", [{}, {"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
def test_after_load_checkpoint(tmp_path: Path, view: str, place: str, only: dict[str, Any]) -> None:
    config = engine_config(**PLACES[place])
    with open_engine(model(1), config) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
    with open_engine(model(2), config) as engine:
        assert_shown(engine, VIEWS[view], lambda: engine.load_checkpoint(tmp_path, **only))
        step(engine)


@pytest.mark.parametrize("other", [{}, {"unit_size": 20_000, "param": "cpu"}], ids=["adopted", "converted"])
def test_after_resume(tmp_path: Path, other: dict[str, Any]) -> None:
    config = engine_config(folder=tmp_path, durable=True)
    with open_engine(model(1), config) as engine:
        step(engine)
    with open_engine(model(2), engine_config(folder=tmp_path, durable=True, **other)) as engine:
        assert_shown(engine, VIEWS["flat"], engine.resume)


def test_in_an_inference_engine(tmp_path: Path) -> None:
    with open_engine(model(1), engine_config()) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
    config: Config = engine_config()
    with infinity.init_inference(model(2), config=config) as engine:
        assert_shown(engine, VIEWS["flat"], lambda: engine.load_checkpoint(tmp_path))


@pytest.mark.parametrize("bf16", [False, True])
def test_after_an_edit_of_the_master(bf16: bool) -> None:
    with open_engine(model(1), engine_config(bf16=bf16)) as engine:

        def change() -> None:
            for parameter in engine.module.parameters():
                infinity.set_full_fp32_param(parameter, torch.randn(parameter.shape))

        assert_shown(engine, VIEWS["flat"], change)
        step(engine)


def test_after_load_with() -> None:
    with open_engine(model(1), engine_config()) as engine:
        state = model(2).state_dict()
        assert_shown(engine, VIEWS["flat"], lambda: engine.load_with(lambda module: module.load_state_dict(state)))


def test_after_gathered_parameters() -> None:
    with open_engine(model(1), engine_config()) as engine:

        def change() -> None:
            with infinity.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(0.5)

        assert_shown(engine, VIEWS["flat"], change)
