"""An optimizer and a scheduler of the user: the engine continues as they would in a plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

import infinity
from infinity.engine.schedules import OneCycle, WarmupLR
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.optim import CPUAdam
from infinity.tiers.device import CpuDevice, Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Batches, Result, assert_close, parameters_of, train
from support.models import Stack, seeded, token_batches

BEFORE, AFTER = token_batches(8)[:4], token_batches(8)[4:]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=True),
    "Adam": partial(torch.optim.Adam, lr=2e-3, eps=1e-6, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "CPUAdam": partial(CPUAdam, lr=2e-3, eps=1e-6, weight_decay=0.1, threads=1),
    "CPUAdam with L2": partial(CPUAdam, lr=2e-3, eps=1e-6, weight_decay=0.1, adamw_mode=False, threads=1),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, vectors then matrices, each in reverse order: unlike the order of units."""
    parameters = list(model.parameters())[::-1]
    return [
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
        {"params": [p for p in parameters if p.dim() > 1], "name": "matrices"},
    ]


def begin(make: MakeOptimizer, batches: Batches = BEFORE, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Return a model and its optimizer after a plain loop over `batches`."""
    model = seeded(Stack).to(dtype)
    optimizer = make(groups_of(model))
    plainly(model, optimizer, batches)
    return model, optimizer


def plainly(model: Any, optimizer: torch.optim.Optimizer, batches: Batches, scheduler: Any = None) -> Result:
    losses = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def open_with(model: nn.Module, config: Any, device: Device | None = None, **given: Any) -> TrainingEngine:
    return infinity.initialize(model, config, device=device or CpuDevice(), **given)[0]


PLACES = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("param", "optim"), PLACES)
def test_continues(kind: str, param: str, optim: str, tmp_path: Path) -> None:
    """The engine continues from the optimizer's groups and states, in place of the config's optimizer."""
    expected = plainly(*begin(OPTIMIZERS[kind]), AFTER)
    model, optimizer = begin(OPTIMIZERS[kind])
    device = LateDevice() if param == "nvme" else CpuDevice()
    config = engine_config(param, optim, folder=tmp_path, lr=1.0, optimizer="Lion")
    with open_with(model, config, device, optimizer=optimizer) as engine:
        assert_close(Result(train(engine, AFTER), parameters_of(engine)), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_are_taken_bit_for_bit(kind: str, tmp_path: Path) -> None:
    _, reference = begin(OPTIMIZERS[kind])
    saved = reference.state_dict()
    model, optimizer = begin(OPTIMIZERS[kind])
    with open_with(model, engine_config(folder=tmp_path), optimizer=optimizer) as engine:
        taken = engine.optimizer.state_dict()
    tensors = 0
    for number, state in saved["state"].items():
        for name, value in state.items():
            if value is not None:
                assert torch.equal(taken["state"][number][name], value)
                tensors += 1
    assert tensors >= (0 if kind == "plain SGD" else len(list(model.parameters())))
    for ours, theirs in zip(taken["param_groups"], saved["param_groups"], strict=True):
        assert all(ours[name] == value for name, value in theirs.items())


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_cpu_adam_in_bf16(moments: Any, tmp_path: Path) -> None:
    """The fp32 values that CPUAdam has for bf16 parameters, and its moments in any format, arrive bit for bit."""
    make = partial(OPTIMIZERS["CPUAdam"], moments=moments)
    reference_model, reference = begin(make, dtype=torch.bfloat16)
    model, optimizer = begin(make, dtype=torch.bfloat16)
    [*_, weight] = [p for group in reference.param_groups for p in group["params"]]
    remainder = reference.state[weight]["remainder"]
    assert remainder.any()
    config = engine_config(folder=tmp_path, bf16=True, moments=moments)
    with open_with(model, config, optimizer=optimizer) as engine:
        [*_, ours] = [p for group in engine.optimizer.param_groups for p in group["params"]]
        bits = (weight.detach().view(torch.int16).int() << 16) + remainder.int()
        assert torch.equal(infinity.get_full_fp32_param(ours).view(torch.int32), bits)
        found = Result(train(engine, AFTER), parameters_of(engine))
    # The stochastic rounding of moments is seeded by position, in which the two differ.
    bound = {"fp32": 1e-5, "bf16": 3e-3, "8bit": 1e-2}[moments]
    assert_close(found, plainly(reference_model, reference, AFTER), loss=bound, parameters=bound)


def test_cpu_adam_in_fp16(tmp_path: Path) -> None:
    reference_model, reference = begin(OPTIMIZERS["CPUAdam"], dtype=torch.float16)
    model, optimizer = begin(OPTIMIZERS["CPUAdam"], dtype=torch.float16)
    masters = [reference.state[p]["master"] for group in reference.param_groups for p in group["params"]]
    config = engine_config(folder=tmp_path, fp16={"loss_scale": 1.0})
    with open_with(model, config, optimizer=optimizer) as engine:
        ours = [p for group in engine.optimizer.param_groups for p in group["params"]]
        for parameter, master in zip(ours, masters, strict=True):
            assert torch.equal(infinity.get_full_fp32_param(parameter), master)
        found = Result(train(engine, AFTER), parameters_of(engine))
    assert_close(found, plainly(reference_model, reference, AFTER), loss=1e-3, parameters=1e-3)


def test_a_function_of_the_parameters(tmp_path: Path) -> None:
    """A function gets model_parameters, or all trainable parameters as a list."""
    seen: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    reference = seeded(Stack)
    expected = plainly(reference, make(groups_of(reference)), BEFORE)
    model = seeded(Stack)
    groups = groups_of(model)
    with open_with(model, engine_config(folder=tmp_path), model_parameters=groups, optimizer=make) as engine:
        assert [group["lr"] for group in engine.optimizer.param_groups] == [5e-3, 0.1]
        assert_close(Result(train(engine, BEFORE), parameters_of(engine)), expected)
    model = seeded(Stack)
    with open_with(model, engine_config(folder=tmp_path), optimizer=make):
        assert list(map(id, seen[-1])) == list(map(id, model.parameters()))


def test_a_subset_of_the_parameters(tmp_path: Path) -> None:
    """Parameters that the optimizer lacks stay unchanged."""

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)

    reference, model = seeded(Stack), seeded(Stack)
    expected = plainly(reference, make(reference), BEFORE)
    with open_with(model, engine_config(folder=tmp_path), optimizer=make(model)) as engine:
        assert_close(Result(train(engine, BEFORE), parameters_of(engine)), expected)


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """The client's groups hold the parameters that the engine constructs."""
    with torch.device("meta"):
        model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with open_with(model, engine_config(folder=tmp_path), optimizer=optimizer) as engine:
        assert {p.device.type for p in optimizer.param_groups[0]["params"]} == {"cpu"}
        assert train(engine, BEFORE * 3)[-1] < 4.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_clients_optimizer(when: str, tmp_path: Path) -> None:
    """Hooks run in each step, if they were registered before initialize or after it; a removed one does not."""

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    def double_decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] *= 2

    def register(optimizer: torch.optim.Optimizer) -> Any:
        optimizer.register_step_pre_hook(halve)
        return optimizer.register_step_post_hook(double_decay)

    reference, plain_optimizer = begin(OPTIMIZERS["AdamW"], [])
    handle = register(plain_optimizer)
    first = plainly(reference, plain_optimizer, BEFORE[:2])
    handle.remove()
    expected = plainly(reference, plain_optimizer, BEFORE[2:])
    model, optimizer = begin(OPTIMIZERS["AdamW"], [])
    handle = register(optimizer) if when == "before" else None
    config = engine_config(folder=tmp_path, update="next_forward")
    with open_with(model, config, optimizer=optimizer) as engine:
        handle = handle or register(optimizer)
        losses = train(engine, BEFORE[:2])
        handle.remove()
        losses += train(engine, BEFORE[2:])
        assert_close(Result(losses, parameters_of(engine)), Result(first.losses + expected.losses, expected.parameters))


# -- schedulers --------------------------------------------------------------------------------------------------------


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = torch_schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch_schedulers.LambdaLR(optimizer, lambda step: 0.5**step)
    return torch_schedulers.SequentialLR(optimizer, [warmup, decay], milestones=[2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": partial(torch_schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": partial(torch_schedulers.CosineAnnealingLR, T_max=5),
    "OneCycleLR": partial(torch_schedulers.OneCycleLR, max_lr=[1e-2, 5e-3], total_steps=9),
    "SequentialLR": sequential,
    "WarmupLR": partial(WarmupLR, warmup_num_steps=3),
    "OneCycle": partial(OneCycle, cycle_min_lr=1e-4, cycle_max_lr=1e-2, cycle_first_step_size=2),
}


@pytest.mark.parametrize("form", ["instance", "function"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, form: str, tmp_path: Path) -> None:
    """A scheduler on the client's optimizer sets the engine's rates and momentum; the config's scheduler is unused."""
    make = SCHEDULERS[name]
    reference, plain_optimizer = begin(OPTIMIZERS["AdamW"], [])
    expected = plainly(reference, plain_optimizer, BEFORE, make(plain_optimizer))
    model, optimizer = begin(OPTIMIZERS["AdamW"], [])
    warmup = {"type": "WarmupLR", "params": {}}
    config = {**engine_config(folder=tmp_path).model_dump(mode="json", exclude_unset=True), "scheduler": warmup}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter", UserWarning)  # SequentialLR of torch 2.6 passes one
        given = make(optimizer) if form == "instance" else make
        engine, _, _, scheduler = infinity.initialize(
            model, config, device=CpuDevice(), optimizer=optimizer, lr_scheduler=given
        )
        with engine:
            assert scheduler is engine.lr_scheduler
            assert (scheduler is given) == (form == "instance")
            assert_close(Result(train(engine, BEFORE), parameters_of(engine)), expected)
            for ours, theirs in zip(engine.optimizer.param_groups, plain_optimizer.param_groups, strict=True):
                assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
                assert ours["betas"] == pytest.approx(theirs["betas"], rel=1e-12)
            assert scheduler is not None
            assert scheduler.get_last_lr() == [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_resume(name: str, tmp_path: Path) -> None:
    """A checkpoint restores the scheduler: training continues bit for bit in a new engine."""

    def start() -> TrainingEngine:
        model, optimizer = begin(OPTIMIZERS["AdamW"], [])
        scheduler = SCHEDULERS[name](optimizer)
        return open_with(model, engine_config(folder=tmp_path), optimizer=optimizer, lr_scheduler=scheduler)

    with start() as engine:
        train(engine, BEFORE)
        engine.save_checkpoint(tmp_path / "saved")
        losses = train(engine, AFTER)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
    with start() as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, AFTER) == losses
        assert [group["lr"] for group in engine.optimizer.param_groups] == rates


def test_a_scheduler_after_the_optimizers_states_were_loaded(tmp_path: Path) -> None:
    """`load_state_dict` leaves the client's scheduler connected."""
    model, optimizer = begin(OPTIMIZERS["AdamW"])
    scheduler = torch_schedulers.LambdaLR(optimizer, lambda step: 0.5**step)
    with open_with(model, engine_config(folder=tmp_path), optimizer=optimizer, lr_scheduler=scheduler) as engine:
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        train(engine, AFTER[:2])
        assert engine.optimizer.param_groups is optimizer.param_groups
        assert [group["lr"] for group in engine.optimizer.param_groups] == [5e-3 / 4, 2e-3 / 4]


def test_the_configs_scheduler_on_the_clients_optimizer(tmp_path: Path) -> None:
    model, optimizer = begin(OPTIMIZERS["AdamW"], [])
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    config = {**engine_config(folder=tmp_path).model_dump(mode="json", exclude_unset=True), "scheduler": warmup}
    with open_with(model, config, optimizer=optimizer) as engine:
        rates = []
        for batch in BEFORE:
            rates.append([group["lr"] for group in optimizer.param_groups])
            train(engine, [batch])
        assert rates == [pytest.approx([5e-3 * part, 2e-3 * part]) for part in (0, 0.5, 1, 1)]


# -- the client's optimizer afterwards ---------------------------------------------------------------------------------


def test_uses_of_the_clients_optimizer_afterwards(tmp_path: Path) -> None:
    """Uses that would have no effect raise an error; changes of hyper-parameters have their effect."""
    model, optimizer = begin(OPTIMIZERS["AdamW"])
    saved = optimizer.state_dict()
    with open_with(model, engine_config(folder=tmp_path), optimizer=optimizer) as engine:
        with pytest.raises(UsageError, match="the engine has taken its states"):
            optimizer.state_dict()
        with pytest.raises(UsageError, match="call it on the optimizer that initialize"):
            optimizer.load_state_dict(saved)
        optimizer.param_groups[1]["lr"] = 0.0
        before = parameters_of(engine)
        engine.backward(engine(*AFTER[0]))
        with pytest.raises(UsageError, match=r"step\(\) was called on the AdamW passed to infinity\.initialize\(\)"):
            optimizer.step()
        with pytest.raises(UsageError, match="a separate SGD was called to update"):
            torch.optim.SGD(model.parameters()).step()
        with pytest.raises(UsageError, match=r"grad was read between backward and engine\.step"):
            optimizer.zero_grad()
        engine.step()
        optimizer.zero_grad()
        after = parameters_of(engine)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(before[name], after[name]) == (parameter.dim() > 1), name
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="param_groups"):
            train(engine, AFTER[:1])
