"""An optimizer of the user's choice, with its states in any tier, gives the bits of a plain loop with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import infinity
from infinity.engine.training import TrainingEngine
from infinity.errors import CheckpointError, ConfigError, ModelError, UpdateError, UsageError
from infinity.tiers.device import CpuDevice, Device
from support.configs import PLACEMENTS, engine_config, raw
from support.late_device import LateDevice
from support.loops import Result, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.rules import OPTIMIZERS, Sluggish, coefficients, matrices, others, plain
from support.states import states_of

STEPS = 4


def stack() -> Stack:
    return seeded(lambda: Stack(width=32, depth=3))


def opened(kind: str, config: Any, device: Device | None = None, model: nn.Module | None = None) -> TrainingEngine:
    model = model or stack()
    return infinity.initialize(model, config, optimizer=OPTIMIZERS[kind](model), device=device or CpuDevice())[0]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not different


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("param", "optim"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme")])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_equals_a_plain_loop(kind: str, param: str, optim: str, bf16: bool, accumulation: int, tmp_path: Path) -> None:
    config = engine_config(param, optim, folder=tmp_path, bf16=bf16, accumulation=accumulation)
    batches = token_batches(STEPS * accumulation)
    expected = plain(stack(), OPTIMIZERS[kind], batches, config)
    with opened(kind, config) as engine:
        assert len(engine.units) > 3
        plan, held = engine.parts.plan, engine.parts.tier_bytes()
        assert all(plan.nbytes()[tier] <= nbytes <= plan.peak_nbytes()[tier] for tier, nbytes in held.items())
        found = Result(train(engine, batches), parameters_of(engine))
    assert found.losses == expected.losses
    assert_equal(found.parameters, expected.parameters)


@pytest.mark.parametrize("kind", ["Muon", "Adafactor", "a user's"])
@pytest.mark.parametrize("update", ["auto", "after_backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping(kind: str, update: str, stage: int, tmp_path: Path) -> None:
    """Gradients are scaled as for a native rule, by the norm of all of them."""
    config = engine_config("nvme" if stage == 3 else "none", folder=tmp_path, clip=0.3, update=update, stage=stage)
    batches, norms = token_batches(STEPS), []
    with opened(kind, config) as engine:
        for batch in batches:
            train(engine, [batch])
            norms.append(engine.grad_norm)
        found = parameters_of(engine)
    scales = coefficients(norms, 0.3)
    assert min(scales) < 1.0
    assert_equal(found, plain(stack(), OPTIMIZERS[kind], batches, config, scales=scales).parameters)


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_fp16(kind: str, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, fp16={"loss_scale": 128.0})
    batches = token_batches(STEPS)
    with opened(kind, config) as engine:
        found = Result(train(engine, batches), parameters_of(engine))
    expected = plain(stack(), OPTIMIZERS[kind], batches, config, loss_scale=128.0)
    assert found.losses == expected.losses
    assert_equal(found.parameters, expected.parameters)


@pytest.mark.parametrize("kind", ["Muon", "NAdam"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_every_pair_of_tiers(kind: str, late: bool, bf16: bool, tmp_path: Path) -> None:
    """Parameters, masters and states are bit-identical, also where copies are late."""
    reference: dict[str, torch.Tensor] | None = None
    for param, place in PLACEMENTS:
        config = engine_config(param, place, folder=tmp_path, bf16=bf16)
        with opened(kind, config, LateDevice(delay=0.01) if late else CpuDevice()) as engine:
            losses = train(engine, token_batches(STEPS))
            found = parameters_of(engine) | states_of(engine) | {"losses": torch.tensor(losses)}
        reference = reference or found
        assert_equal(found, reference)


def test_muon_beside_the_native_adamw(tmp_path: Path) -> None:
    """AdamW's parameters are in units of their own, updated by its kernels, with moments in 8 bits."""
    model = stack()
    optimizers = [optim.Muon(matrices(model)), optim.AdamW(others(model), lr=1e-3)]
    config = engine_config(folder=tmp_path, bf16=True, moments="8bit")
    with infinity.initialize(model, config, optimizer=optimizers, device=CpuDevice())[0] as engine:
        losses = train(engine, token_batches(8))
        by_parameter = {unit.name for unit in engine.units if unit.layout.windows}
        assert 0 < len(by_parameter) < len(engine.units)
        assert {len(slot.shape) for unit in engine.units for slot in unit.layout.slots if slot.record} == {2}
        states = engine.optimizer.state_dict()
        assert sorted(states["param_groups"][0])[:3] == ["adjust_lr_fn", "eps", "lr"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dict_is_that_of_the_class(kind: str, tmp_path: Path) -> None:
    """`state_dict` has torch's layout: the class loads it, and both go on with the same bits."""
    config, batches = engine_config(folder=tmp_path), token_batches(2 * STEPS)
    model = stack()
    with opened(kind, config, model=model) as engine:
        train(engine, batches[:STEPS])
        saved = engine.optimizer.state_dict()
        values = parameters_of(engine)
        train(engine, batches[STEPS:])
        expected = parameters_of(engine)

    def resumed(model: nn.Module) -> list[optim.Optimizer]:
        made = OPTIMIZERS[kind](model)
        first, groups = 0, 0
        for each in made:
            count = sum(len(group["params"]) for group in each.param_groups)
            states = copy.deepcopy(saved["state"])
            own = saved["param_groups"][groups : groups + len(each.param_groups)]
            numbers = {n: n - first for group in own for n in group["params"]}
            each.load_state_dict(
                {
                    "state": {numbers[n]: s for n, s in states.items() if n in numbers},
                    "param_groups": [{**g, "params": [numbers[n] for n in g["params"]]} for g in own],
                }
            )
            first, groups = first + count, groups + len(own)
        return made

    plain_model = stack()
    plain_model.load_state_dict(values)
    assert_equal(plain(plain_model, resumed, batches[STEPS:], config).parameters, expected)
    # And back: the engine takes over the states of the class.
    again = stack()
    again.load_state_dict(values)
    with infinity.initialize(again, config, optimizer=resumed(again), device=CpuDevice())[0] as engine:
        train(engine, batches[STEPS:])
        assert_equal(parameters_of(engine), expected)


@pytest.mark.parametrize("kind", ["Muon", "Adafactor", "a user's"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_checkpoint(kind: str, bf16: bool, tmp_path: Path) -> None:
    """A checkpoint resumes in other tiers and other units, after one step and after several."""
    batches = token_batches(STEPS)
    for steps in (0, 1, 2):
        config = engine_config(folder=tmp_path, bf16=bf16)
        with opened(kind, config) as engine:
            train(engine, batches[:steps])
            engine.save_checkpoint(tmp_path / "saved", tag=str(steps))
            train(engine, batches[steps:])
            expected = parameters_of(engine) | states_of(engine)
        other = engine_config("cpu", "none", bf16=bf16, unit_size=10_000)
        with opened(kind, other) as engine:
            engine.load_checkpoint(tmp_path / "saved", tag=str(steps))
            train(engine, batches[steps:])
            assert_equal(parameters_of(engine) | states_of(engine), expected)


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    with opened("NAdam", engine_config(folder=tmp_path)) as engine:
        train(engine, token_batches(2))
        engine.save_checkpoint(tmp_path / "saved")
    with (
        opened("Adafactor", engine_config(folder=tmp_path)) as engine,
        pytest.raises(CheckpointError, match="NAdam and 1 param_groups, and this engine has Adafactor"),
    ):
        engine.load_checkpoint(tmp_path / "saved")
    model = stack()
    momentum = optim.RMSprop(model.parameters(), momentum=0.9)
    with infinity.initialize(model, engine_config(folder=tmp_path), optimizer=momentum, device=CpuDevice())[
        0
    ] as engine:
        train(engine, token_batches(1))
        engine.save_checkpoint(tmp_path / "other")
    model = stack()
    without = optim.RMSprop(model.parameters())
    with (
        infinity.initialize(model, engine_config(folder=tmp_path), optimizer=without, device=CpuDevice())[0] as engine,
        pytest.raises(CheckpointError, match=r"other states of .*square_avg, momentum_buffer\) than .*square_avg\)"),
    ):
        engine.load_checkpoint(tmp_path / "other")


def test_states_of_one_parameter(tmp_path: Path) -> None:
    """`get_full_optimizer_state` and `set_full_optimizer_state` know the states of the class, in their shapes."""
    with opened("Adafactor", engine_config(folder=tmp_path)) as engine:
        weight = matrices(engine.module)[1]
        with pytest.raises(UsageError, match="has no row_var yet"):
            infinity.get_full_optimizer_state(weight, "row_var")
        train(engine, token_batches(1))
        rows = infinity.get_full_optimizer_state(weight, "row_var")
        assert rows.shape == (weight.shape[0], 1) and rows.any()
        infinity.set_full_optimizer_state(weight, "row_var", torch.full_like(rows, 7.0))
        assert torch.equal(infinity.get_full_optimizer_state(weight, "row_var"), torch.full_like(rows, 7.0))
        with pytest.raises(UsageError, match=r"row_var of .* has shape"):
            infinity.set_full_optimizer_state(weight, "row_var", torch.zeros(3))
        with pytest.raises(UsageError, match="no state 'exp_avg'"):
            infinity.get_full_optimizer_state(weight, "exp_avg")


def test_an_edit_reaches_the_master(tmp_path: Path) -> None:
    """A parameter in bf16 that the user sets between steps trains from there, as with a native rule."""
    with opened("NAdam", engine_config(folder=tmp_path, bf16=True)) as engine:
        train(engine, token_batches(2))
        weight = matrices(engine.module)[1]
        with torch.no_grad():
            weight[0].fill_(0.5)
        master = infinity.get_full_fp32_param(weight)
        assert torch.equal(master[0], torch.full_like(master[0], 0.5))
        assert not torch.equal(master[1], master[1].bfloat16().float())


@pytest.mark.parametrize("kind", ["NAdam", "Muon"])
def test_named_in_the_config(kind: str, tmp_path: Path) -> None:
    """`optimizer.type` takes the classes of torch.optim. Muon updates matrices, AdamW the rest."""
    config = raw(tmp_path, optimizer={"type": kind.lower(), "params": {"lr": 1e-2}})
    model = stack()
    with infinity.initialize(model, config, device=CpuDevice())[0] as engine:
        before = parameters_of(engine)
        train(engine, token_batches(2))
        assert all(not torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        groups = engine.optimizer.param_groups
        assert {group["lr"] for group in groups} == {1e-2}
        assert [group.get("momentum") for group in groups] == ([0.95, None] if kind == "Muon" else [None])


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("named", [False, True], ids=["passed", "named in the config"])
def test_optimizers_with_a_native_rule(kind: str, named: bool, tmp_path: Path) -> None:
    """`infinity.optimizer: "torch"` trains with torch's own step, whose bits the native kernels only come near to."""
    values: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {})

    def make(model: nn.Module) -> list[optim.Optimizer]:
        return [getattr(optim, kind)(model.parameters(), **values)]

    config = raw(tmp_path, optimizer={"type": kind, "params": values}, infinity={"optimizer": "torch"})
    model, batches = stack(), token_batches(STEPS)
    made = None if named else make(model)
    with infinity.initialize(model, config, optimizer=made, device=CpuDevice())[0] as engine:
        train(engine, batches)
        found = parameters_of(engine)
    assert_equal(found, plain(stack(), make, batches, engine_config()).parameters)


def test_use_muon_decides(tmp_path: Path) -> None:
    model = stack()
    for p in model.parameters():
        p.use_muon = p is matrices(model)[1]  # type: ignore[attr-defined]
    config = raw(tmp_path, optimizer={"type": "Muon", "params": {"muon_lr": 0.1, "adam_lr": 0.2}})
    with infinity.initialize(model, config, device=CpuDevice())[0] as engine:
        first, second = engine.optimizer.param_groups
        assert (len(first["params"]), first["lr"], second["lr"]) == (1, 0.1, 0.2)


def two_groups(params: Any) -> list[dict[str, Any]]:
    first, *others = params
    return [{"params": [first]}, {"params": others}]


class Counting(optim.SGD):
    """Keeps a count of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step()


class Grouping(Counting):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1


class Coupling(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)


class Decaying(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


class Sharing(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["same"] = p.detach()


class Keyed(Counting):
    """Keeps a count under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"]["count"] = self.state["steps"].get("count", 0) + 1


class ByGroup(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, group in enumerate(self.param_groups):
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=1.0 + number)


class ByParameter(Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scales = {p: 2.0 for group in self.param_groups for p in group["params"]}


class InPlace(Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(1)


class Moving(optim.SGD):
    """Moves states to other names, keeps the parameter's old value, and swaps memory with a state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state |= {name: torch.zeros_like(p) for name in ("last", "before", "old", "swapped")}
            new = p.data - 0.01 * (p.grad + state["last"] + 2 * state["before"] + 0.1 * state["old"])
            state["before"], state["last"] = state["last"], p.grad.clone()
            state["old"] = p.data
            state["swapped"], p.data = new, state["swapped"]
            state["swapped"], p.data = p.data, state["swapped"]


class Marked(optim.SGD):
    """Reads an attribute of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * getattr(p, "factor", 1.0))


class Drawing(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.randn_like(p))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (optim.LBFGS, "its step\\(\\) needs closure, so it couples parameters"),
        (optim.SparseAdam, "SparseAdam does not support dense gradients"),
        (Counting, "changes its attribute 'calls'"),
        (Grouping, "changes 'calls' of the param_group"),
        (Coupling, "depends on the other parameters"),
        (Drawing, "draws random numbers"),
        (Decaying, "that have no gradient"),
        (Sharing, "share memory"),
        (Keyed, "keeps a state of 'steps'"),
        (lambda params: ByGroup(two_groups(params)), "depends on the other parameters"),
        (ByParameter, "its attribute 'scales' holds parameters"),
        (InPlace, "changes its attribute 'seen'"),
        (lambda params: optim.NAdam(params, differentiable=True), "differentiable=True"),
    ],
)
def test_an_optimizer_that_cannot_be_applied_is_refused(make: Any, says: str) -> None:
    model = stack()
    with pytest.raises(ConfigError, match=says):
        infinity.initialize(model, engine_config("cpu", "cpu"), optimizer=make(model.parameters()))


def test_attributes_of_parameters(tmp_path: Path) -> None:
    """A class reads attributes that a script has set, as `use_muon`."""

    def make(model: nn.Module) -> list[optim.Optimizer]:
        matrices(model)[1].factor = 3.0  # type: ignore[attr-defined]
        return [Marked(model.parameters(), lr=0.1)]

    config, model = engine_config(folder=tmp_path, bf16=True), stack()
    with infinity.initialize(model, config, optimizer=make(model), device=CpuDevice())[0] as engine:
        train(engine, token_batches(2))
        found = parameters_of(engine)
    assert_equal(found, plain(stack(), make, token_batches(2), config).parameters)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_states_that_move(bf16: bool, tmp_path: Path) -> None:
    """A class may give a state's memory to another state or to the parameter, or keep the parameter's old memory."""

    def make(model: nn.Module) -> list[optim.Optimizer]:
        return [Moving(model.parameters(), lr=0.1)]

    config, model = engine_config(folder=tmp_path, bf16=bf16), stack()
    with infinity.initialize(model, config, optimizer=make(model), device=CpuDevice())[0] as engine:
        train(engine, token_batches(STEPS))
        found = parameters_of(engine)
    assert_equal(found, plain(stack(), make, token_batches(STEPS), config).parameters)


class Named(optim.SGD):
    """Gives states the names of an engine's own, and names that are alike once they are joined."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state: dict[Any, Any] = self.state[p]
            if not state:
                state |= {name: torch.zeros_like(p) for name in ("master", "param", "records", "a.b", "0", 0)}
                state["a"] = {"b": torch.zeros_like(p)}
            values = [*(value for name, value in state.items() if name != "a"), state["a"]["b"]]
            for number, value in enumerate(values):
                value.mul_(0.1 * number).add_(p.grad)
            p.sub_(torch.stack(values).cumsum(0).sum(0), alpha=0.002)


@pytest.mark.every_case
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("param", "optim_"), [("none", "none"), ("nvme", "nvme")])
def test_states_of_any_names(bf16: bool, param: str, optim_: str, tmp_path: Path) -> None:
    """Each state has a place of its own, in the tier and in a checkpoint."""

    def opened() -> TrainingEngine:
        model = stack()
        made = Named(model.parameters(), lr=0.1)
        return infinity.initialize(model, config, optimizer=made, device=CpuDevice())[0]

    config, batches = engine_config(param, optim_, folder=tmp_path, bf16=bf16), token_batches(STEPS)
    expected = plain(stack(), lambda model: [Named(model.parameters(), lr=0.1)], batches, config)
    with opened() as engine:
        train(engine, batches[:2])
        engine.save_checkpoint(tmp_path / "saved")
        names = [*engine.optimizer.state_dict()["state"][0]]
        assert names == ["master", "param", "records", "a.b", "0", 0, "a"]
        train(engine, batches[2:])
        assert_equal(parameters_of(engine), expected.parameters)
    with opened() as engine:
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, batches[2:])
        assert_equal(parameters_of(engine), expected.parameters)


class Strides(Sluggish):
    """Its `step` grows by 10 in each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["step"] = 10 * self.state[p]["count"]


@pytest.mark.every_case
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_that_is_no_count_of_updates(steps: int, tmp_path: Path) -> None:
    """A state dict says by its states, and not by a number, which of them the next update finds."""

    def opened() -> TrainingEngine:
        model = stack()
        return infinity.initialize(model, config, optimizer=Strides(model.parameters()), device=CpuDevice())[0]

    config, batches = engine_config(folder=tmp_path), token_batches(STEPS)
    with opened() as engine:
        train(engine, batches[:steps])
        values, states = parameters_of(engine), copy.deepcopy(engine.optimizer.state_dict())
        train(engine, batches[steps:])
        expected = parameters_of(engine)
    with opened() as engine:
        engine.load_with(lambda model: model.load_state_dict(values))
        engine.optimizer.load_state_dict(states)
        loaded = engine.optimizer.state_dict()["state"]
        assert {n: [*state] for n, state in loaded.items()} == {n: [*s] for n, s in states["state"].items()}
        train(engine, batches[steps:])
        assert_equal(parameters_of(engine), expected)


def test_other_refusals(tmp_path: Path) -> None:
    def refused(says: str, kind: Any = ConfigError, **given: Any) -> None:
        model = given.pop("model", None) or stack()
        made = given.pop("make", lambda model: optim.NAdam(model.parameters()))(model)
        with pytest.raises(kind, match=says):
            infinity.initialize(model, engine_config("cpu", "cpu", **given), optimizer=made, device=CpuDevice())

    refused('infinity.moments is "8bit"', moments="8bit")
    refused("in two optimizers", make=lambda m: [optim.NAdam(m.parameters()), optim.SGD(m.parameters(), lr=0.1)])
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 512))
    infinity.nn.tile(model, "32KiB")
    refused("is a tile of", ModelError, model=model)


def test_a_state_that_has_no_place_is_an_error(tmp_path: Path) -> None:
    """A state that appears after many steps stops the engine, and does not train on without it."""

    class Late(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    if count == 5:
                        self.state[p]["late"] = torch.zeros_like(p)

    model = stack()
    with infinity.initialize(
        model, engine_config(folder=tmp_path), optimizer=Late(model.parameters(), lr=0.1), device=CpuDevice()
    )[0] as engine:
        says = r"Late failed to update .*: its states are count number, late \[.*\] now, and were count number at"
        with pytest.raises(UpdateError, match=says):
            train(engine, token_batches(6))
        with pytest.raises(UsageError, match="count number"):
            train(engine, token_batches(1))


@pytest.mark.parametrize("kind", ["Muon", "a user's"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("param", "optim"), [("nvme", "nvme"), ("cpu", "none")])
def test_a_durable_run_resumes(kind: str, bf16: bool, param: str, optim: str, tmp_path: Path) -> None:
    """A run that ends without a checkpoint goes on from its last step, in these tiers and in a checkpoint's copy."""
    batches = token_batches(STEPS)
    plain_config = engine_config(param, optim, folder=tmp_path, bf16=bf16)
    with opened(kind, plain_config) as engine:
        train(engine, batches)
        expected = parameters_of(engine) | states_of(engine)
    for steps in (1, 3):
        config = engine_config(param, optim, folder=tmp_path, bf16=bf16, durable=True, run=f"run{steps}")
        with opened(kind, config) as engine:
            train(engine, batches[:steps])
        with opened(kind, config) as engine:
            engine.resume()
            assert engine.global_steps == steps
            engine.save_checkpoint(tmp_path / "copies", tag=str(steps))
            train(engine, batches[steps:])
            assert_equal(parameters_of(engine) | states_of(engine), expected)
        with opened(kind, engine_config("cpu", "cpu", bf16=bf16, unit_size=10_000)) as engine:
            engine.load_checkpoint(tmp_path / "copies", tag=str(steps))
            train(engine, batches[steps:])
            assert_equal(parameters_of(engine) | states_of(engine), expected)
