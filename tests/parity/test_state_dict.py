"""`optimizer.state_dict()` has torch's layout: training moves from torch.optim to an engine and back unchanged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine.training import TrainingEngine
from infinity.errors import ConfigError, ModelError, UsageError
from infinity.optim import CPUAdam
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Batches, Result, assert_close, open_engine, parameters_of, train
from support.models import VOCABULARY, Stack, seeded, token_batches
from support.states import states_of

BEFORE, AFTER = token_batches(8)[:4], token_batches(8)[4:]


class Skipping(Stack):
    """A Stack with a block that some steps skip, an unused block, and small parameters of its own."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(32)
        self.skips = False

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks[: 3 if self.skips else 4]:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, vectors then matrices, each in reverse order: unlike the order of units and of slots."""
    named = list(model.named_parameters())[::-1]
    return [
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3, "betas": (0.8, 0.95)},
        {"params": [p for _, p in named if p.dim() > 1]},
    ]


def torch_optimizer(kind: str, groups: Any, config: Config) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **config.optimizer.params.model_dump())
    return made


def go_on(model: Any, optimizer: torch.optim.Optimizer, batches: Batches, skip: int | None = None) -> Result:
    """Train by the plain loop. skip: the step that skips a block."""
    losses = []
    for step, batch in enumerate(batches):
        model.skips = step == skip
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def go_on_engine(engine: TrainingEngine, batches: Batches, skip: int | None = None) -> Result:
    losses = []
    for step, batch in enumerate(batches):
        engine.module.skips = step == skip
        losses += train(engine, [batch])
    return Result(losses, parameters_of(engine))


PLACES = [("none", "none", "auto"), ("cpu", "cpu", "next_forward"), ("nvme", "nvme", "auto"), ("nvme", "nvme", "late")]


@pytest.mark.parametrize(("param", "optim", "update"), PLACES)
def test_from_torch_and_back(param: str, optim: str, update: str, tmp_path: Path) -> None:
    """Moving from torch to the engine and back equals torch alone; parameters were updated 4, 3 or 0 times."""
    config = engine_config(param, optim, folder=tmp_path, update="auto" if update == "late" else update, eps=1e-6)
    plain = seeded(Skipping)
    reference = torch_optimizer("AdamW", groups_of(plain), config)
    go_on(plain, reference, BEFORE, skip=1)
    model = seeded(Skipping, 3)
    model.load_state_dict(plain.state_dict())
    saved = copy.deepcopy(reference.state_dict())
    assert {float(state["step"]) for state in saved["state"].values()} == {3, 4}

    device = LateDevice() if update == "late" else CpuDevice()
    with TrainingEngine(model, config, groups_of(model), device=device) as engine:
        names = {id(p): name for name, p in engine.module.named_parameters()}
        expected = [name for group in groups_of(plain) for name in names_in(plain, group["params"])]
        assert [names[id(p)] for group in engine.optimizer.param_groups for p in group["params"]] == expected
        engine.optimizer.load_state_dict(saved)
        assert_states(engine.optimizer.state_dict(), saved, rtol=0, atol=0)
        ours = go_on_engine(engine, AFTER, skip=2)
        back, parameters = engine.optimizer.state_dict(), engine.state_dict()
    assert_close(ours, go_on(plain, reference, AFTER, skip=2))
    assert_states(back, reference.state_dict(), rtol=1e-4, atol=1e-7)

    again = seeded(Skipping, 5)
    again.load_state_dict(parameters)
    optimizer = torch_optimizer("AdamW", groups_of(again), config)
    optimizer.load_state_dict(back)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.95), (0.9, 0.999)]
    assert_close(go_on(again, optimizer, BEFORE), go_on(plain, reference, BEFORE))


def names_in(model: nn.Module, params: list[nn.Parameter]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in params]


def assert_states(one: dict[str, Any], other: dict[str, Any], **close: float) -> None:
    assert one["state"].keys() == other["state"].keys()
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in other["param_groups"]]
    for number, state in other["state"].items():
        assert one["state"][number].keys() >= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(one["state"][number][name], value, **close, msg=f"{name} of {number}")


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD", "Lion"])
def test_other_rules(kind: str, tmp_path: Path) -> None:
    """Training goes on as in torch's optimizer; for Lion, which torch lacks, as in an engine that was not reloaded."""
    params = {
        "Adam": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6},
        "Adagrad": {"lr": 1e-2, "lr_decay": 0.1},
        "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        "Lion": {"lr": 1e-4},
    }[kind]
    base = engine_config(folder=tmp_path).model_dump(mode="json", exclude_unset=True)
    config = Config.load({**base, "optimizer": {"type": kind, "params": params}})
    plain, model = seeded(Stack), seeded(Stack, 3)
    if kind == "Lion":
        with open_engine(plain, config) as first:
            train(first, BEFORE)
            saved, parameters = first.optimizer.state_dict(), first.state_dict()
            expected = Result(train(first, AFTER), parameters_of(first))
    else:
        reference = torch_optimizer(kind, plain.parameters(), config)
        go_on(plain, reference, BEFORE)
        saved, parameters = reference.state_dict(), copy.deepcopy(plain.state_dict())
        saved = copy.deepcopy(saved)
        expected = go_on(plain, reference, AFTER)
    model.load_state_dict(parameters)
    with open_engine(model, config) as engine:
        engine.optimizer.load_state_dict(saved)
        assert_states(engine.optimizer.state_dict(), saved, rtol=0, atol=0)
        assert_close(Result(train(engine, AFTER), parameters_of(engine)), expected)
        back, parameters = engine.optimizer.state_dict(), engine.state_dict()
    if kind != "Lion":
        again = seeded(Stack, 5)
        again.load_state_dict(parameters)
        optimizer = torch_optimizer(kind, again.parameters(), config)
        optimizer.load_state_dict(back)
        assert_close(go_on(again, optimizer, BEFORE), go_on(plain, reference, BEFORE))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_formats(bf16: bool, moments: str, tmp_path: Path) -> None:
    """A plain loop with fp32 masters moves to an engine after 4 steps. fp32 moments stay bit-identical, bf16 ones stay
    within 2^-7, 8-bit ones within 2^-2 of a block's largest. Losses stay within 1e-5, with bf16 parameters or moments
    within 1 %, with 8-bit moments within 3 %.
    """
    config = engine_config(folder=tmp_path, bf16=bf16, moments=moments, eps=1e-6)
    dtype = torch.bfloat16 if bf16 else torch.float32
    computing = seeded(Stack).to(dtype)
    masters = seeded(Stack)
    masters.load_state_dict(computing.state_dict())
    reference = torch_optimizer("AdamW", masters.parameters(), config)

    def plainly(batches: Batches) -> list[float]:
        losses = []
        for batch in batches:
            loss = computing(*batch)
            loss.backward()
            losses.append(loss.item())
            for master, param in zip(masters.parameters(), computing.parameters(), strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
            reference.step()
            computing.load_state_dict(masters.state_dict())
        return losses

    plainly(BEFORE)
    saved = copy.deepcopy(reference.state_dict())
    model = seeded(Stack, 3)
    model.load_state_dict(masters.state_dict())
    exact = {name: p.detach().clone() for name, p in masters.named_parameters()}
    with open_engine(model, config) as engine:
        for name, parameter in engine.module.named_parameters():
            infinity.set_full_fp32_param(parameter, exact[name])
        engine.optimizer.load_state_dict(saved)
        found = engine.optimizer.state_dict()
        for number, state in saved["state"].items():
            mine = found["state"][number]
            assert torch.equal(mine["step"], state["step"]) and mine["exp_avg"].dtype == torch.float32
            for name in ("exp_avg", "exp_avg_sq"):
                error, largest = (mine[name] - state[name]).abs(), state[name].abs()
                bound = {"fp32": 0 * largest, "bf16": largest * 2**-7, "8bit": largest.max() * 2**-2}[moments]
                assert (error <= bound).all(), (number, name)
                behind = infinity.get_full_optimizer_state(list(engine.module.parameters())[number], name)
                assert torch.equal(behind, mine[name])
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(infinity.get_full_fp32_param(parameter), exact[name])  # not touched by the load
        ours = train(engine, AFTER)
        kept = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(kept)  # stored values are exact in their format
        if moments != "8bit":
            assert_states(engine.optimizer.state_dict(), kept, rtol=0, atol=0)
    tolerance = 0.03 if moments == "8bit" else 0.01 if bf16 or moments == "bf16" else 1e-5
    assert ours == pytest.approx(plainly(AFTER), rel=tolerance)


def test_cpu_adam_loads_it(tmp_path: Path) -> None:
    """CPUAdam loads an engine's AdamW state and stays AdamW, which a key of the group selects."""
    config = engine_config(folder=tmp_path, weight_decay=0.5, eps=1e-6)
    with open_engine(seeded(Stack), config) as engine:
        train(engine, BEFORE)
        saved, parameters = engine.optimizer.state_dict(), engine.state_dict()
        expected = Result(train(engine, AFTER), parameters_of(engine))
    model = seeded(Stack, 3)
    model.load_state_dict(parameters)
    optimizer = CPUAdam(model.parameters())
    optimizer.load_state_dict(saved)
    assert_close(go_on(model, optimizer, AFTER), expected)


def test_a_model_from_the_meta_device(tmp_path: Path) -> None:
    """Parameters from the meta device, which `initialize` replaces, keep their positions."""
    with torch.device("meta"):
        model = Skipping()
    with open_engine(model, engine_config(folder=tmp_path)) as engine:
        listed = names_in(engine.module, engine.optimizer.param_groups[0]["params"])
        assert listed == [name for name, _ in engine.module.named_parameters()]
        train(engine, BEFORE[:1])
        saved = engine.optimizer.state_dict()
        shapes = {n: list(p.shape) for n, p in enumerate(engine.module.parameters())}
        unused = {n for n, (name, _) in enumerate(engine.module.named_parameters()) if name.startswith("blocks.4")}
        assert {n: list(state["exp_avg"].shape) for n, state in saved["state"].items()} == {
            n: shape for n, shape in shapes.items() if n not in unused
        }


def test_frozen_parameters_and_empty_groups_keep_their_positions(tmp_path: Path) -> None:
    """State dicts and param_groups count frozen parameters and empty groups, as in torch."""

    def made(seed: int = 0) -> tuple[Stack, list[dict[str, Any]]]:
        model = seeded(Stack, seed)
        model.embedding.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        frozen = {"params": [model.embedding.weight], "lr": 1.0}
        return model, [frozen, {"params": []}, {"params": [*model.blocks.parameters(), model.head.weight], "lr": 1e-3}]

    config = engine_config(folder=tmp_path, eps=1e-6)
    plain, groups = made()
    reference = torch_optimizer("AdamW", groups, config)
    go_on(plain, reference, BEFORE)
    model, groups = made(3)
    model.load_state_dict(plain.state_dict())
    with TrainingEngine(model, config, groups, device=CpuDevice()) as engine:
        engine.optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        assert_states(engine.optimizer.state_dict(), reference.state_dict(), rtol=0, atol=0)
        for optimizer in (engine.optimizer, reference):
            optimizer.param_groups[2]["lr"] = 5e-3
        ours = Result(train(engine, AFTER), parameters_of(engine))
    assert_close(ours, go_on(plain, reference, AFTER))


def test_hyper_parameters_and_a_scheduler_go_on(tmp_path: Path) -> None:
    """Keys that users and schedulers put into groups are restored, and a scheduler goes on with them."""

    def opened() -> tuple[TrainingEngine, Any]:
        engine = open_engine(seeded(Stack), engine_config(folder=tmp_path))
        return engine, torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)

    def go(engine: TrainingEngine, schedule: Any, batches: Batches) -> dict[str, Any]:
        for batch in batches:
            train(engine, [batch])
            schedule.step()
        found: dict[str, Any] = engine.optimizer.state_dict()
        return found

    engine, schedule = opened()
    with engine:
        engine.optimizer.param_groups[0]["name"] = "all"
        saved, where = go(engine, schedule, BEFORE[:2]), schedule.state_dict()
        expected = go(engine, schedule, BEFORE[2:3])
    engine, schedule = opened()
    with engine:
        engine.optimizer.load_state_dict(saved)
        schedule.load_state_dict(where)
        keys = set(engine.optimizer.param_groups[0])
        assert keys == {"params", "name", "initial_lr", "lr", "betas", "eps", "weight_decay"}
        found = go(engine, schedule, BEFORE[2:3])
    assert found["param_groups"] == expected["param_groups"]
    assert (found["param_groups"][0]["lr"], found["param_groups"][0]["initial_lr"]) == (1.25e-4, 1e-3)
    assert float(found["state"][0]["step"]) == 3


def edited(saved: dict[str, Any], **group: Any) -> dict[str, Any]:
    made = copy.deepcopy(saved)
    made["param_groups"][0].update(group)
    return made


def test_what_is_refused(tmp_path: Path) -> None:
    """Bad state dicts raise an error that names the fault, before any change."""
    model = seeded(Stack)
    plain = seeded(Stack)
    reference = torch.optim.AdamW(plain.named_parameters())
    go_on(plain, reference, BEFORE)
    saved = reference.state_dict()

    def without(number: int, key: str, **more: Any) -> dict[str, Any]:
        made = copy.deepcopy(saved)
        del made["state"][number][key]
        made["state"][number].update(more)
        return made

    names = saved["param_groups"][0]["param_names"]
    swapped = [names[1], names[0], *names[2:]]
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    go_on(plain, sgd, BEFORE[:1])
    two = torch.optim.AdamW([{"params": list(plain.parameters())[:3]}, {"params": list(plain.parameters())[3:]}])
    fewer = torch.optim.AdamW(list(plain.parameters())[1:])
    weight = torch.zeros(VOCABULARY, 32)
    cases: list[tuple[Any, type[Exception], str]] = [
        (fewer.state_dict(), ModelError, r"has 37 parameters in 1 group and this optimizer 38 parameters in 1 group"),
        (two.state_dict(), ModelError, r"38 parameters in 2 groups \(3, 35\).*model_parameters"),
        (sgd.state_dict(), ModelError, r"lacks betas, eps and has momentum, dampening, nesterov.*type adamw"),
        (edited(saved, decoupled_weight_decay=False), ModelError, "decoupled_weight_decay=False"),
        (edited(saved, amsgrad=True), ConfigError, "amsgrad=True"),
        (edited(saved, maximize=True), ConfigError, "maximize=True"),
        (edited(saved, lr=-1.0), ConfigError, "lr is -1.0"),
        (edited(saved, param_names=swapped), ModelError, f"parameter 0 is {names[1]} in the state dict and {names[0]}"),
        (without(0, "exp_avg"), ModelError, r"parameter 0 \(embedding.weight\) lacks exp_avg"),
        (without(0, "step"), ModelError, "step None"),
        (without(0, "step", step=torch.tensor(1.5)), ModelError, r"step tensor\(1.5"),
        (without(0, "exp_avg", exp_avg=weight.T), ModelError, r"shape \[32, 61\] in the state dict.*\[61, 32\]"),
        (without(0, "exp_avg", exp_avg=weight.long()), ModelError, "exp_avg of embedding.weight is torch.int64"),
        (without(0, "exp_avg", exp_avg=weight, max_exp_avg_sq=weight), ModelError, "max_exp_avg_sq"),
        ({"state": {**saved["state"], 99: {}}, "param_groups": saved["param_groups"]}, ModelError, "state 99"),
        ({}, ModelError, "no optimizer's state dict"),
    ]
    with open_engine(model, engine_config(folder=tmp_path)) as engine:
        train(engine, BEFORE[:2])
        before, groups = states_of(engine), copy.deepcopy([g["lr"] for g in engine.optimizer.param_groups])
        for given, error, said in cases:
            with pytest.raises(error, match=said):
                engine.optimizer.load_state_dict(given)
        assert [unit.steps for unit in engine.units] == [[2] * len(unit.steps) for unit in engine.units]
        assert all(torch.equal(value, before[name]) for name, value in states_of(engine).items())
        assert [g["lr"] for g in engine.optimizer.param_groups] == groups
        train(engine, BEFORE[2:])
    frozen = half_frozen()
    with (
        TrainingEngine(frozen, engine_config(folder=tmp_path), frozen.parameters(), device=CpuDevice()) as engine,
        pytest.raises(ModelError, match=r"parameter 0 \(embedding.weight\), which this engine does not train"),
    ):
        engine.optimizer.load_state_dict(saved)
    frozen = half_frozen()
    with TrainingEngine(frozen, engine_config(folder=tmp_path), frozen.parameters(), device=CpuDevice()) as engine:
        del saved["state"][0]
        with pytest.raises(ModelError, match=f"parameter 0 is {names[1]}"):  # also for frozen parameters
            engine.optimizer.load_state_dict(edited(saved, param_names=swapped))
        engine.optimizer.load_state_dict(saved)


def half_frozen() -> Stack:
    model = seeded(Stack)
    model.embedding.requires_grad_(False)
    return model


@pytest.mark.parametrize("update", ["auto", "next_forward"])
def test_not_between_backward_and_step(update: str, tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, accumulation=2, update=update)) as engine:
        saved = engine.optimizer.state_dict()
        assert saved["state"] == {}
        for done, said in ((1, "1 of 2 micro-batches are collected.*engine.drop_gradients"), (2, "after engine.step")):
            engine.backward(engine(*BEFORE[0]))
            for call in (
                engine.optimizer.state_dict,
                lambda: engine.optimizer.load_state_dict(saved),
                lambda: engine.save_checkpoint(tmp_path / "saved"),
            ):
                with pytest.raises(UsageError, match=said):
                    call()
            assert engine.micro_steps == done
        engine.step()
        assert len(engine.optimizer.state_dict()["state"]) == len(list(engine.module.parameters()))
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.optimizer.state_dict()


def test_a_save_in_the_background_has_the_states_before(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path)) as engine:
        train(engine, BEFORE[:2])
        before, saved = states_of(engine), engine.optimizer.state_dict()
        engine.save_checkpoint(tmp_path, background=True)
        for state in saved["state"].values():
            state["exp_avg"].fill_(1.0)
        engine.optimizer.load_state_dict(saved)
        assert engine.saving is not None
        engine.saving.wait()
        assert states_of(engine)["head.weight/exp_avg"].eq(1).all()
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in states_of(engine).items())


def test_hooks_of_state_dicts_are_called(tmp_path: Path) -> None:
    """Hooks of `state_dict` and `load_state_dict` are called and may change the dict."""
    with open_engine(seeded(Stack), engine_config(folder=tmp_path)) as engine:
        train(engine, BEFORE[:1])
        optimizer = engine.optimizer
        optimizer.register_state_dict_post_hook(lambda _, made: {**made, "version": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, made: {**made, "param_groups": [{**group, "lr": 0.5} for group in made["param_groups"]]}
        )
        saved = optimizer.state_dict()
        assert saved["version"] == 7 and not optimizer.state
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5 and saved["param_groups"][0]["lr"] == 1e-3


def test_no_group_is_added_to_an_engine(tmp_path: Path) -> None:
    model = seeded(Stack)
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    with TrainingEngine(model, engine_config(folder=tmp_path), rest, device=CpuDevice()) as engine:
        with pytest.raises(UsageError, match=r"add_param_group.*restore=True.*model_parameters to a new infinity"):
            engine.optimizer.add_param_group({"params": [engine.module.head.weight]})
        assert len(engine.optimizer.param_groups) == 1
