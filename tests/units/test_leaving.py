"""A unit's edit is found although its buffer is compared after it was evicted, by whatever reads its tier next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.rules import Hyper
from infinity.units.unit import Residency, Unit
from infinity.units.write_back import EditCheck, WriteBack
from infinity.update.job import Gradient, PlacedUpdate, UpdateJob
from infinity.update.pipeline import UpdatePipeline
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(3)


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def engine(request: pytest.FixtureRequest) -> Any:
    """An engine after two steps and a forward, which has more units than buffers."""
    config = engine_config("cpu", "cpu", bf16=request.param, prefetch_bytes=20_000)
    with open_engine(seeded(Stack), config, LateDevice()) as opened:
        train(opened, BATCHES[:2])
        opened.settle()
        with torch.no_grad():
            opened(*BATCHES[2])
        yield opened


def evicted(engine: TrainingEngine, *, edited: bool = True) -> tuple[Unit, torch.Tensor]:
    """Begin to evict a resident unit that has been edited. Returns it and the values of its first parameter."""
    unit = next(unit for unit in engine.units if unit.residency is Residency.RESIDENT)
    values = unit.parameters[0].data.clone()
    if edited:
        values = unit.parameters[0].data.mul_(0.5).clone()  # no version
    store = engine.parts.store
    store.evict(unit)
    assert unit.residency is Residency.RELEASED and store.buffers.left_by(unit) is not None
    return unit, values


def in_tier(engine: TrainingEngine, unit: Unit) -> torch.Tensor:
    """Return the first parameter's values in its tier, where they are now."""
    slot = unit.layout.slots[0]
    return engine.parts.states.read_param(unit.layout)[slot.offset : slot.stop].view(slot.shape)


class Pending:
    """A transfer that ends when it is waited for."""

    waited = False

    def wait(self) -> None:
        self.waited = True

    def done(self) -> bool:
        return self.waited


READERS: dict[str, Callable[[TrainingEngine, Unit], object]] = {
    "a fetch": lambda engine, unit: engine.parts.runner.use(unit),
    "an update": lambda engine, unit: engine.updates.runner._updating.assign(unit),
    "a commit": lambda engine, unit: engine.parts.runner.edits.write(),
    "a checkpoint": lambda engine, unit: engine.settle(),
    "another unit": lambda engine, unit: engine.parts.store.lease(unit).release(),
}


@pytest.mark.every_case
@pytest.mark.parametrize("reader", READERS)
def test_an_edit_is_written_before(engine: TrainingEngine, reader: str) -> None:
    unit, values = evicted(engine)
    READERS[reader](engine, unit)
    assert torch.equal(in_tier(engine, unit), values)
    assert engine.parts.store.buffers.left_by(unit) is None
    if reader == "an update":
        engine.parts.store.buffers.take(unit).release()


def test_a_commit_of_a_unit_with_a_due_update_has_the_edit(engine: TrainingEngine) -> None:
    unit, values = evicted(engine)
    unit.postpone(UpdateJob(unit.layout, lambda: [], [Hyper(lr=0.1)], 1.0, 0))
    engine.parts.runner.edits.write()
    assert torch.equal(in_tier(engine, unit), values)
    unit.due_update = None


def test_a_unit_is_not_read_ahead_before_its_edit_is_written(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, _ = evicted(engine)
    store, ahead = engine.parts.store, list[int]()
    monkeypatch.setitem(vars(store._states), "reads_ahead", ["a tier"])
    monkeypatch.setattr(
        type(store._states), "read_ahead", lambda states, layouts: ahead.extend(one.index for one in layouts)
    )
    monkeypatch.setattr(store._schedule.trace, "upcoming", lambda: range(len(engine.units)))
    store.read_ahead()
    assert ahead and unit.index not in ahead
    engine.parts.runner.edits.write()
    store.read_ahead()
    assert unit.index in ahead


def test_an_unedited_unit_is_not_written(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, _ = evicted(engine, edited=False)
    store = engine.parts.store
    monkeypatch.setattr(store.write_back, "write_shard", lambda unit, lease: pytest.fail("nothing was edited"))
    engine.parts.runner.edits.write()
    assert store.buffers.left_by(unit) is None


def test_a_buffer_with_views_is_kept_and_compared_at_once(engine: TrainingEngine) -> None:
    """The view may edit it at any time."""
    unit = next(unit for unit in engine.units if unit.residency is Residency.RESIDENT)
    view, store = unit.parameters[0].detach(), engine.parts.store
    with pytest.warns(UserWarning, match="still refers"):
        store.evict(unit)
    assert unit in store.kept and store.buffers.left_by(unit) is None
    del view


def test_an_edit_in_a_backward_of_several_ranks_is_refused(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would write another one. As long as the unit is resident, and once it is evicted."""
    store, edits = engine.parts.store, engine.parts.runner.edits
    edits.begin_backward()
    evicted(engine)
    with pytest.raises(UsageError, match="were edited by a hook during backward"):
        edits.end_backward()
    store.moves.failure = None
    for leaving in store.buffers.all_leaving():
        store.buffers.release(leaving)


def test_a_step_collects_each_comparison_at_a_later_use(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute of the uses in between is issued before the model's thread sleeps."""
    uses, started, waited = [0], dict[EditCheck, int](), list[int]()
    use = engine.parts.runner.use
    start, call = WriteBack.start, EditCheck.__call__

    def noted(write_back: WriteBack, unit: Unit) -> EditCheck:
        check = start(write_back, unit)
        started[check] = uses[0]
        return check

    def collected(check: EditCheck) -> bool:
        if not threading.current_thread().name.startswith("infinity-") and check in started:
            waited.append(uses[0] - started[check])
        return call(check)

    def used(unit: Unit) -> None:
        uses[0] += engine.parts.schedule.trace.last != unit.index
        use(unit)

    train(engine, BATCHES[:2])
    monkeypatch.setattr(WriteBack, "start", noted)
    monkeypatch.setattr(EditCheck, "__call__", collected)
    monkeypatch.setattr(engine.parts.runner, "use", used)
    train(engine, BATCHES[:1])
    assert len(waited) >= len(engine.units)
    assert min(waited) > 0


def test_an_update_in_the_tier_alone_reads_the_edit_from_the_buffer(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is not given to another unit before, and the model's thread waits for nothing else."""
    unit = next(unit for unit in engine.units if unit.residency is Residency.RESIDENT)
    store, submitted = engine.parts.store, list[PlacedUpdate]()
    monkeypatch.setattr(engine.updates.runner._updating, "_is_rewritten_in_tier_only", lambda unit: True)
    monkeypatch.setattr(UpdatePipeline, "submit", lambda pipeline, placed: submitted.append(placed))
    values = unit.parameters[0].data.mul_(0.5).clone()
    job = UpdateJob(unit.layout, lambda: [], [Hyper(lr=0.1)], 1.0, 0, Future[Gradient]())
    engine.updates.runner.start_update(unit, job)
    leaving = store.buffers.left_by(unit)
    assert leaving is not None and unit.residency is Residency.RELEASED

    def update() -> None:
        assert store.buffers.left_by(unit) is leaving
        placed = submitted.pop()
        assert placed.target is None and placed.prepare is not None
        placed.prepare()
        job.progress.computed.keep()
        job.progress.done.keep()

    monkeypatch.setattr(store.moves, "await_update", lambda progress: update() if submitted else None)
    store._collect(leaving)
    assert torch.equal(in_tier(engine, unit), values)
    assert store.buffers.left_by(unit) is None
    unit.end_step()


def test_a_unit_leaves_once_its_update_is_written(engine: TrainingEngine) -> None:
    """Several ranks evict a unit whose write is under way. It reads the buffer."""
    unit, writing = next(unit for unit in engine.units if unit.residency is Residency.RESIDENT), Pending()
    unit.update = SimpleNamespace(done=writing)  # type: ignore[assignment]
    engine.parts.store.evict(unit)
    assert writing.waited and engine.parts.store.buffers.left_by(unit) is not None


def test_a_comparison_waits_for_compute_before_the_copy_of_its_result() -> None:
    """The reason of the sleep is the compute."""
    computed, copied = Pending(), Pending()
    assert not EditCheck(LateDevice(), None, torch.ones(1, dtype=torch.uint8), computed, copied)()
    assert computed.waited and copied.waited
