"""Optimizers and schedulers that `infinity.initialize` refuses, before it changes anything."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infinity.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch import nn

import infinity
from infinity.errors import ConfigError, ModelError, UsageError
from infinity.optim import CPUAdam
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import parameters_of, train
from support.models import Stack, seeded, token_batches


class Momentum(torch.optim.SGD):
    """An optimizer whose update is not SGD's."""

    def step(self, closure: Any = None) -> Any:
        return None


class Halving(torch.optim.AdamW):
    """An optimizer whose step is wrapped."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, *args: Any, **options: Any) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(*args, **options)


class LionByHalves(DeepSpeedCPULion):
    """An optimizer of this package whose update was replaced."""

    def _update(self, param: torch.Tensor, hyper: Any) -> None:
        super()._update(param, hyper)
        param *= 0.5


class FusedLionByHalves(FusedLion):
    """An optimizer of this package whose step was replaced."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Slow(torch.optim.SGD):
    """An optimizer whose update is SGD's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = CPUAdam([{"params": [p]} for p in model.parameters()])
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    return optimizer


def with_a_wrong_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    [first, *_] = model.parameters()
    optimizer.state[first] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    return optimizer


def with_another_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


OPTIMIZERS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda m: Halving(m.parameters()), ConfigError, r"Halving, which .* step\(\) changes 'lr' of the param_group"),
    (lambda m: FusedLionByHalves(m.parameters()), ConfigError, r"FusedLionByHalves, which an engine cannot apply"),
    (with_another_step, ConfigError, r"optimizer\.step of this AdamW was replaced"),
    (lambda m: adamw(m, differentiable=True), ConfigError, r"differentiable=True"),
    (lambda m: adamw(m, lr=torch.tensor(1e-3), capturable=True), ConfigError, r"a tensor as lr.*: pass a number"),
    (lambda m: adamw(seeded(Stack)), ConfigError, r"optimizer \(AdamW\) has a parameter .* that is not the model's"),
    (lambda m: CPUAdam(m.parameters(), moments="8bit"), ConfigError, r'set infinity\.moments to "8bit"'),
    (with_a_wrong_state, ModelError, r"exp_avg of embedding\.weight has shape \[3\]"),
    (lambda m: "AdamW", ConfigError, r"optimizer is a str: pass a torch optimizer"),
    (lambda m: lambda parameters: None, ConfigError, r"returned a NoneType: return a torch optimizer"),
]


@pytest.mark.parametrize(("make", "error", "said"), OPTIMIZERS)
def test_refused_optimizers(make: Callable[[Any], Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    """The model and the optimizer stay as they were."""
    model = seeded(Stack)
    optimizer = make(model)
    with pytest.raises(error, match=said):
        infinity.initialize(model, engine_config(folder=tmp_path), optimizer=optimizer, device=CpuDevice())
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.state_dict()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seeded(Stack).parameters(), strict=True))


@pytest.mark.parametrize(
    "make", [lambda m: Momentum(m.parameters()), lambda m: LionByHalves(m.parameters()), mixed], ids=["0", "1", "2"]
)
def test_a_changed_update_is_applied(make: Callable[[Any], Any], tmp_path: Path) -> None:
    """A subclass with an update of its own trains by that one, and so does Adam whose groups decay differently."""
    expected, model = seeded(Stack), seeded(Stack)
    optimizer = make(expected)
    for batch in token_batches(3):
        expected(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = engine_config(folder=tmp_path)
    with infinity.initialize(model, config, optimizer=make(model), device=CpuDevice())[0] as engine:
        train(engine, token_batches(3))
        found = parameters_of(engine)
    assert not [name for name, value in expected.named_parameters() if not torch.equal(value, found[name])]


def test_a_group_that_is_added_to_one_of_several(tmp_path: Path) -> None:
    model = seeded(Stack)
    first, *others = model.parameters()
    made = [torch.optim.NAdam([first]), torch.optim.AdamW(others)]
    config = engine_config(folder=tmp_path)
    with infinity.initialize(model, config, optimizer=made, device=CpuDevice())[0] as engine:
        made[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="param_groups were changed"):
            train(engine, token_batches(1))


SCHEDULERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda o: torch.optim.lr_scheduler.StepLR(adamw(seeded(Stack)), 2), r"rates of a AdamW that the engine does not"),
    (lambda o: 3, r"lr_scheduler \(int\) has no step, state_dict, load_state_dict"),
]


@pytest.mark.parametrize("form", ["instance", "function"])
@pytest.mark.parametrize(("make", "said"), SCHEDULERS)
def test_refused_schedulers(form: str, make: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    model = seeded(Stack)
    optimizer = adamw(model)
    given = make(optimizer) if form == "instance" else make
    with pytest.raises(ConfigError, match=said):
        infinity.initialize(
            model, engine_config(folder=tmp_path), optimizer=optimizer, lr_scheduler=given, device=CpuDevice()
        )


def test_a_scheduler_without_its_optimizer(tmp_path: Path) -> None:
    model = seeded(Stack)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw(model), 2)
    with pytest.raises(ConfigError, match=r"pass that optimizer as optimizer=, or pass a function"):
        infinity.initialize(model, engine_config(folder=tmp_path), lr_scheduler=scheduler, device=CpuDevice())


def test_a_function_that_constructs_a_scheduler_of_the_configs_optimizer(tmp_path: Path) -> None:
    model, config = seeded(Stack), engine_config(folder=tmp_path, lr=1e-2)

    def half(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    engine, optimizer, _, scheduler = infinity.initialize(model, config, lr_scheduler=half, device=CpuDevice())
    with engine:
        train(engine, token_batches(2))
        assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 4


def test_a_subclass_with_the_same_update(tmp_path: Path) -> None:
    model = seeded(Stack)
    optimizer = Slow(model.parameters())
    engine, *_ = infinity.initialize(model, engine_config(folder=tmp_path), optimizer=optimizer, device=CpuDevice())
    with engine:
        assert engine.config.optimizer.rule == "sgd"
        before = parameters_of(engine)
        train(engine, token_batches(1))
        assert not torch.equal(before["head.weight"], parameters_of(engine)["head.weight"])


def test_what_is_replaced_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="infinity")
    model = seeded(Stack)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine, *_ = infinity.initialize(
        model, engine_config(folder=tmp_path), optimizer=optimizer, lr_scheduler=scheduler, device=CpuDevice()
    )
    engine.close()
    assert "optimizer: the script's AdamW in place of the config's optimizer" in caplog.messages
    assert "lr scheduler: StepLR" in caplog.messages
