"""Optimizers and schedulers that the script passes to `initialize`: the engine trains as they would in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity.deepspeed as deepspeed
from infinity.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from infinity.deepspeed.ops.lion import DeepSpeedCPULion
from infinity.deepspeed.runtime.lr_schedules import WarmupLR
from infinity.errors import ConfigError
from infinity.rules import MOMENT_NAMES
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]
BATCHES = token_batches(4)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "DeepSpeedCPUAdam": partial(DeepSpeedCPUAdam, lr=2e-3, weight_decay=0.1),
    "FusedAdam": partial(FusedAdam, lr=2e-3, weight_decay=0.1, adam_w_mode=False),
    "DeepSpeedCPUAdagrad": partial(DeepSpeedCPUAdagrad, lr=1e-2),
    "DeepSpeedCPULion": partial(DeepSpeedCPULion, lr=1e-3, betas=(0.9, 0.99)),
}


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> dict[str, torch.Tensor]:
    """Train with DeepSpeed's default clipping, and return the parameters."""
    for batch in BATCHES:
        model(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return dict(model.state_dict())


def trained(engine: Any) -> dict[str, torch.Tensor]:
    for batch in BATCHES:
        engine.backward(engine(*batch))
        engine.step()
    values: dict[str, torch.Tensor] = engine.module_state_dict()
    return values


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["instance", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_scripts_optimizer_trains(opens: Opens, name: str, form: str) -> None:
    """Its rule and hyper-parameters replace the config's, which may lack an optimizer."""
    make = OPTIMIZERS[name]
    reference = seeded(Stack)
    expected = plainly(reference, make(reference.parameters()))
    model = seeded(Stack)
    optimizer: Any = make(model.parameters()) if form == "instance" else make
    section = {"optimizer": None} if form == "instance" else {}
    engine = opens(2, model=model, given={"optimizer": optimizer}, **section)
    assert engine.client_optimizer is optimizer
    if form == "instance":
        assert engine.optimizer_name() == name
    assert engine.get_mom() == ([0.9] if name == "SGD" else [engine.optimizer.param_groups[0].get("betas", 0.0)])
    assert_equal(trained(engine), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_and_states_are_continued(opens: Opens, stage: int) -> None:
    """An optimizer with two groups that has trained goes on with its moments."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(Stack)
        vectors = [p for p in model.parameters() if p.dim() == 1]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)
        plainly(model, optimizer)
        return model, optimizer

    expected = plainly(*begin())
    model, optimizer = begin()
    engine = opens(stage, model=model, given={"optimizer": optimizer})
    assert engine.get_lr() == [2e-3, 5e-3]
    assert_equal(trained(engine), expected)


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"])
def test_fp32_masters_of_a_bf16_model_are_taken(opens: Opens, name: str) -> None:
    """An optimizer that has trained 16-bit parameters hands over the values that they were rounded from."""
    reference, model = seeded(Stack).bfloat16(), seeded(Stack).bfloat16()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (reference, model)]
    for trains in zip((reference, model), optimizers, strict=True):
        plainly(*trains)
    engine = opens(2, model=model, given={"optimizer": optimizers[1]}, bf16={"enabled": True})
    weight = engine.module.head.weight
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert torch.equal(master.bfloat16(), reference.head.weight)
    assert not torch.equal(master, reference.head.weight.float())
    state = optimizers[0].state[reference.head.weight]
    if name != "DeepSpeedCPUAdam":  # which keeps a 16-bit remainder in place of the master
        assert torch.equal(master, state["master"])
    for moment in MOMENT_NAMES[engine.optimizer.rule]:
        assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(weight, moment), state[moment])
    assert engine.optimizer.state_dict()["state"][0]["step"] == len(BATCHES)


@pytest.mark.parametrize("form", ["instance", "function"])
@pytest.mark.parametrize("name", ["LambdaLR", "WarmupLR"])
def test_the_scripts_scheduler_sets_the_rates(opens: Opens, name: str, form: str) -> None:
    """A scheduler replaces the config's, and `step` advances it."""
    makes: dict[str, Callable[[Any], Any]] = {
        "LambdaLR": partial(LambdaLR, lr_lambda=lambda step: 0.5**step),
        "WarmupLR": partial(WarmupLR, warmup_num_steps=3),
    }
    make, adamw = makes[name], OPTIMIZERS["AdamW"]
    reference = seeded(Stack)
    optimizer = adamw(reference.parameters())
    expected = plainly(reference, optimizer, make(optimizer))
    model = seeded(Stack)
    client = adamw(model.parameters())
    scheduler = make(client) if form == "instance" else make
    config = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}}
    engine = opens(2, model=model, given={"optimizer": client, "lr_scheduler": scheduler}, **config)
    assert (engine.lr_scheduler is scheduler) == (form == "instance")
    assert_equal(trained(engine), expected)
    assert engine.get_lr() == [optimizer.param_groups[0]["lr"]]


def test_the_configs_scheduler_drives_the_scripts_optimizer(opens: Opens) -> None:
    """Rates of the config's WarmupLR begin at iteration -1, and reach the client's param_groups."""
    model = seeded(Stack)
    client = OPTIMIZERS["AdamW"](model.parameters())
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    engine = opens(2, model=model, given={"optimizer": client}, scheduler=schedule)
    rates = []
    for batch in BATCHES:
        rates.append(client.param_groups[0]["lr"])
        engine.backward(engine(*batch))
        engine.step()
    assert rates == pytest.approx([0.0, 0.0, 1e-3, 2e-3])


def test_a_scheduler_of_another_optimizer_is_refused(opens: Opens) -> None:
    """Its rates would never reach the engine."""
    model = seeded(Stack)
    scheduler = LambdaLR(OPTIMIZERS["SGD"](model.parameters()), lambda step: 1.0)
    with pytest.raises(ConfigError, match="sets the rates of a SGD that the engine does not use"):
        opens(2, model=model, given={"lr_scheduler": scheduler})
