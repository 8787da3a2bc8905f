"""Calls of an engine wait for what they need: gradients, updates, saves, and edits that are not in their tier."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.background import Saver
from infinity.engine import training
from infinity.engine.training import TrainingEngine
from infinity.errors import NonFiniteError, UsageError
from infinity.grads.buffers import Sent
from infinity.grads.store import GradStore
from infinity.tiers.transfer import Failed
from infinity.units.unit import Residency, Unit
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_gradients import LateGradients
from support.loops import open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.paced_save import Pace

BATCHES = token_batches(4)
DUE: dict[str, Any] = {"update": "next_forward", "prefetch_bytes": 0}
"""Updates of most units are due when a step has ended."""


def opened(device: LateDevice | None = None, **options: Any) -> TrainingEngine:
    return open_engine(seeded(Stack), engine_config(**options), device)


def backward(engine: TrainingEngine, *, factor: float = 1.0) -> None:
    """factor: of the gradients."""
    loss = engine(*BATCHES[0])
    loss.register_hook(lambda gradient: gradient * factor)
    engine.backward(loss)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGradients]:
    made = LateGradients(monkeypatch)
    yield made
    made.free()


@pytest.fixture
def forgotten(late: LateGradients, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each end of a step, whether its gradients were stored: their tier may release the memory then."""
    found: list[bool] = []
    forget = GradStore.forget

    def watched(store: GradStore) -> None:
        found.append(late.are_stored)
        forget(store)

    monkeypatch.setattr(GradStore, "forget", watched)
    return found


def test_updates_become_due_once_their_gradients_are_stored(late: LateGradients, forgotten: list[bool]) -> None:
    with opened(clip=0.5, **DUE) as engine:
        backward(engine)
        engine.step()
        assert forgotten == [True]


def test_a_skipped_step_drops_gradients_that_are_stored(late: LateGradients, forgotten: list[bool]) -> None:
    with opened(fp16={"initial_scale_power": 32, "hysteresis": 1}, **DUE) as engine:
        backward(engine, factor=math.inf)
        engine.step()
        assert engine.skipped_steps == 1 and forgotten == [True]


def test_a_step_that_is_not_finite_drops_gradients_that_are_stored(late: LateGradients, forgotten: list[bool]) -> None:
    with opened(clip=0.5, **DUE) as engine:
        backward(engine, factor=math.nan)
        with pytest.raises(NonFiniteError):
            engine.step()
        assert forgotten == [True]


def test_a_gradient_is_read_once_it_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameters have one is known then."""
    gate = threading.Event()
    issue, settle = Sent.await_issue, GradStore.settle

    def late(sent: Sent, slots: dict[int, set[int]]) -> None:
        if sent.unit.index == 0:  # the last of a backward, which needs the buffers of the others
            gate.wait(20)
        issue(sent, slots)

    monkeypatch.setattr(Sent, "await_issue", late)
    monkeypatch.setattr(GradStore, "settle", lambda store: (gate.set(), settle(store))[1])
    with opened(LateDevice(), clip=0.5) as engine:
        backward(engine)
        try:
            assert infinity.get_full_grad(engine.module.embedding.weight) is not None
        finally:
            gate.set()


# -- updates -----------------------------------------------------------------------------------------------------------


class Pending:
    """A transfer that ends when it is waited for."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def done(self) -> bool:
        return self.waited


def replace_update(engine: TrainingEngine, done: Any) -> Unit:
    """Replace the last update of a unit without a buffer. Returns the unit."""
    unit = next(unit for unit in engine.units if unit.residency is Residency.RELEASED)
    unit.update = SimpleNamespace(done=done)  # type: ignore[assignment]
    return unit


def test_a_step_raises_the_error_of_an_update_that_has_ended() -> None:
    engine = opened(**DUE)
    backward(engine)
    replace_update(engine, Failed(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        engine.step()
    assert engine.global_steps == 0
    engine.close()


def test_a_step_does_not_wait_for_the_update_before() -> None:
    with opened(**DUE) as engine:
        backward(engine)
        update = Pending()
        unit = replace_update(engine, update)
        engine.step()
        assert not update.waited
        unit.update = None


def test_updates_after_backward_end_with_the_step() -> None:
    with opened(**DUE | {"update": "after_backward"}) as engine:
        train(engine, BATCHES[:1])
        assert all(unit.due_update is None for unit in engine.units)
        assert all(unit.update is None or unit.update.done.done() for unit in engine.units)


def whole_state(engine: TrainingEngine) -> dict[str, Any]:
    engine.settle()
    return parameters_of(engine)


READS: dict[str, Callable[[TrainingEngine], dict[str, Any]]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "get_full_fp32_param": lambda engine: {
        name: infinity.get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()
    },
    "settle": whole_state,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_are_read_after_the_updates_that_are_due(read: Callable[[TrainingEngine], dict[str, Any]]) -> None:
    with opened(**DUE) as engine:
        train(engine, BATCHES[:2])
        assert any(unit.due_update is not None for unit in engine.units)
        found, expected = read(engine), parameters_of(engine)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_moments_are_read_after_the_updates_that_are_due() -> None:
    with opened(**DUE) as engine:
        train(engine, BATCHES[:2])
        states = engine.optimizer.state_dict()["state"].values()
        assert {int(state["step"]) for state in states} == {2}


def test_a_checkpoint_has_the_updates_that_are_due(tmp_path: Path) -> None:
    with opened(**DUE) as engine:
        train(engine, BATCHES[:2])
        engine.save_checkpoint(tmp_path)
        expected = parameters_of(engine)
    with opened() as engine:
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())


def test_updates_that_are_due_are_no_part_of_a_loaded_model(tmp_path: Path) -> None:
    """They are executed before the load, not after it."""
    with opened(**DUE) as engine:
        engine.save_checkpoint(tmp_path)
        expected = parameters_of(engine)
        train(engine, BATCHES[:1])
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())


def test_a_closed_model_has_the_updates_that_were_due() -> None:
    model = seeded(Stack)
    engine = open_engine(model, engine_config(**DUE))
    train(engine, BATCHES[:2])
    engine.close(restore=True)
    with opened(**DUE) as other:
        train(other, BATCHES[:2])
        expected = parameters_of(other)
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


def test_a_durable_model_is_loaded_while_updates_are_due(tmp_path: Path) -> None:
    """An edit is written after the commit, which waits for the updates."""
    with opened(folder=tmp_path, durable=True, clip=0.5, **DUE) as engine:
        train(engine, BATCHES[:1])
        halves = {name: value * 0.5 for name, value in engine.state_dict().items()}
        train(engine, BATCHES[1:2])

        def load(model: nn.Module) -> None:
            model.load_state_dict(halves)

        engine.load_with(load)
        assert all(torch.equal(value, halves[name]) for name, value in engine.state_dict().items())


# -- edits and buffers -------------------------------------------------------------------------------------------------


def test_edits_are_in_their_tiers_when_the_engine_has_settled() -> None:
    with opened(prefetch_bytes="1GiB", cache_bytes="1GiB", bf16=True) as engine:
        train(engine, BATCHES[:1])
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(0.5)
        engine.settle()
        assert all(unit.residency is Residency.RELEASED for unit in engine.units)
        for unit in engine.units:
            for slot in unit.layout.slots:
                flat = engine.parts.states.read_param(unit.layout)
                assert flat[slot.offset : slot.stop].eq(0.5).all()


# -- saves in the background -------------------------------------------------------------------------------------------


def test_states_are_replaced_once_they_are_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The save goes on when the engine waits for a unit."""
    pace = Pace(monkeypatch)
    with opened() as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path, background=True)
        assert pace.held.wait(20)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        pace.free()
    assert pace.waited and not pace.overdue


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    """Saves in the background go on when the engine waits for their end."""
    made = Pace(monkeypatch)
    join = Saver.join
    monkeypatch.setattr(Saver, "join", lambda saver: (made.free(), join(saver))[1])
    yield made
    made.free()


def test_a_load_waits_for_the_save_under_way(pace: Pace, tmp_path: Path) -> None:
    with opened() as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path, background=True)
        assert pace.held.wait(20)
        assert engine.load_checkpoint(tmp_path)[0] == tmp_path / "global_step1"


def test_states_are_offloaded_once_they_are_saved(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    offload = training.offload
    with opened(LateDevice(), param="none", optim="none") as engine:
        train(engine, BATCHES[:1])
        engine.save_checkpoint(tmp_path, background=True)
        assert pace.held.wait(20)
        saving = engine.saving
        assert saving is not None
        monkeypatch.setattr(training, "offload", lambda parts: (seen.append(saving.done()), offload(parts)))
        engine.offload_states()
        assert seen == [True]
        engine.reload_states()


def test_a_closed_engine_loads_no_values() -> None:
    engine = opened(param="none")
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.load_with(lambda model: None)
