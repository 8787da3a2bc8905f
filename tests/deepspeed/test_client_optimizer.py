"""Optimizers and schedulers that the script passes to `initialize`: the engine trains as they would in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from infinity.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from infinity.deepspeed.ops.lion import DeepSpeedCPULion
from infinity.deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity.deepspeed as deepspeed
from infinity.errors import ConfigError
from infinity.rules import RULES
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
    for moment in RULES[engine.optimizer.rule].moments:
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


# -- optimizers that Accelerate replaces -------------------------------------------------------------------------------


def replaced(kind: type[torch.optim.Optimizer], original: torch.optim.Optimizer, **options: Any) -> Any:
    """Construct one of DeepSpeed's optimizers from another's groups, as Accelerate does for offload_optimizer."""
    return kind(original.param_groups, lr=original.defaults["lr"], adamw_mode=False, **options)  # type: ignore[call-arg]


OTHERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "Adam", "AdamW")
)
TAKE_NO_MATRIX = ("LBFGS", "SparseAdam")
"""Optimizers of torch whose groups have neither a key of their own that Adam lacks, nor a use for a model."""


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in TAKE_NO_MATRIX])
def test_groups_of_another_optimizer_are_refused(name: str) -> None:
    """DeepSpeedCPUAdam refuses the groups of torch's other optimizers, before it changes them."""
    original = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    keys = set(original.param_groups[0])
    with pytest.raises(ConfigError, match="DeepSpeedCPUAdam was given the param_groups of") as raised:
        replaced(DeepSpeedCPUAdam, original)
    assert 'Set "zero_force_ds_cpu_optimizer": false' in str(raised.value)
    assert "--optim adamw_torch" in str(raised.value)
    assert set(original.param_groups[0]) == keys


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_of_adam_are_taken(kind: type[torch.optim.Adam]) -> None:
    """The groups are shared with the original, whose scheduler goes on to set their rates."""
    original = kind([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer = replaced(DeepSpeedCPUAdam, original)
    assert optimizer.param_groups[0] is original.param_groups[0]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lr": 0.1, "name": "head", "lr_scale": 0.5, "initial_lr": 0.1},
        {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "t_alpha": None},
    ],
    ids=["bare", "own keys", "AdamW of bitsandbytes"],
)
def test_other_groups_are_taken(keys: dict[str, Any]) -> None:
    assert DeepSpeedCPUAdam([{"params": [nn.Parameter(torch.zeros(2))], **keys}])


def test_adagrad_that_accelerate_replaces(opens: Opens) -> None:
    """DeepSpeedCPUAdagrad takes torch's groups and trains as torch's, with lr_decay too."""
    model, other = seeded(Stack), seeded(Stack)
    options = {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-6}
    expected = plainly(model, torch.optim.Adagrad(model.parameters(), **options))
    optimizer = replaced(DeepSpeedCPUAdagrad, torch.optim.Adagrad(other.parameters(), **options))
    engine = opens(2, model=other, given={"optimizer": optimizer}, optimizer=None)
    assert_equal(trained(engine), expected)


def test_adagrad_with_a_first_sum_is_refused() -> None:
    original = torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], initial_accumulator_value=0.5)
    with pytest.raises(ConfigError, match=r"initial_accumulator_value is 0\.5.*zero_force_ds_cpu_optimizer"):
        replaced(DeepSpeedCPUAdagrad, original)


def test_lion_takes_accelerates_arguments() -> None:
    assert DeepSpeedCPULion([nn.Parameter(torch.zeros(2))], lr=0.1, weight_decay=0.0, adamw_mode=False)
