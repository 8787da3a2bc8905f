"""The store waits for updates and saves that still use a unit's buffer or its tiers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.engine.gather import get_full_fp32_param
from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from infinity.plan.layout import UnitLayout
from infinity.rules import Hyper
from infinity.schedule.schedule import Update
from infinity.tiers.transfer import DONE, Transfer
from infinity.units.states import UnitStates
from infinity.units.unit import Residency, Unit
from infinity.update.job import Gradient, PlacedUpdate, UpdateJob
from infinity.update.pipeline import UpdatePipeline
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(1)


class Pending:
    """A transfer that refers to a unit's buffer until it is waited for."""

    def __init__(self, unit: Unit | None = None) -> None:
        self.waited = False
        self._references = [] if unit is None else [unit.shard_bytes(0)[:]]

    def wait(self) -> None:
        self.waited = True
        self._references.clear()

    def done(self) -> bool:
        return self.waited


@pytest.fixture
def afters() -> list[Transfer]:
    """The transfer `after` of each update that was submitted."""
    return []


@pytest.fixture(params=[False], ids=["fp32"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, afters: list[Transfer]) -> Any:
    """An engine whose updates end at once and change nothing."""

    def end(pipeline: UpdatePipeline, placed: PlacedUpdate) -> None:
        afters.append(placed.after)
        if placed.prepare is not None:
            placed.after.wait()
            placed.prepare()
        placed.job.progress.computed.keep(DONE)
        placed.job.progress.done.keep()

    config = engine_config("cpu", "cpu", bf16=request.param, prefetch_bytes=20_000)
    with open_engine(seeded(Stack), config, LateDevice()) as opened:
        train(opened, BATCHES)
        with torch.no_grad():
            opened(*BATCHES[0])
        opened.updates.runner.settle()
        monkeypatch.setattr(UpdatePipeline, "submit", end)
        yield opened


def resident(engine: TrainingEngine) -> Unit:
    return next(unit for unit in engine.units if unit.residency is Residency.RESIDENT)


def released(engine: TrainingEngine) -> Unit:
    return next(unit for unit in engine.units if unit.residency is Residency.RELEASED)


def pending_update(unit: Unit, *, refers: bool = False) -> Pending:
    """Let an update of the unit be under way. refers: to its buffer."""
    update = Pending(unit if refers else None)
    unit.update = SimpleNamespace(done=update)  # type: ignore[assignment]
    return update


@pytest.fixture
def edits(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each edit that is written to the masters, True if the unit's `snapshot_read` was waited for before."""
    waited = list[bool]()
    sync = UnitStates.sync_masters_from_edit

    def watched(states: UnitStates, layout: UnitLayout, shard: torch.Tensor) -> None:
        waited.append(engine.units[layout.index].snapshot_read.done())
        sync(states, layout, shard)

    monkeypatch.setattr(UnitStates, "sync_masters_from_edit", watched)
    return waited


def edit(unit: Unit) -> None:
    """Edit the unit while a save reads its states."""
    unit.snapshot_read = Pending()
    with torch.no_grad():
        unit.parameters[0].add_(1)


def update(unit: Unit, *, early: bool) -> UpdateJob:
    """early: with a gradient, as during backward."""
    gradient = Future[Gradient]() if early else None
    return UpdateJob(unit.layout, lambda: [], [Hyper(lr=0.1)], 1.0, 0, gradient, gate=unit.snapshot_read)


def test_a_write_of_the_update_before_is_no_view(engine: TrainingEngine) -> None:
    """Ranks of a group start updates of units whose former update has not ended; its write is no reason to give the
    unit another buffer.
    """
    unit, store = resident(engine), engine.parts.store
    pending_update(unit, refers=True)
    assert unit.is_viewed()
    engine.updates.runner.start_update(unit, update(unit, early=True))
    assert unit not in store.kept


def test_a_unit_is_finished_with_while_its_update_before_is_written(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write is no view that backward may read."""
    unit, runner = resident(engine), engine.updates.runner
    monkeypatch.setattr(engine.parts.schedule.trace, "finished_with", lambda index: True)
    pending_update(unit, refers=True)
    assert runner._when_updated(unit) is Update.NOW


def test_a_unit_that_autograd_saved_is_not_finished_with(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, runner = resident(engine), engine.updates.runner
    monkeypatch.setattr(engine.parts.schedule.trace, "finished_with", lambda index: True)
    assert runner._when_updated(unit) is Update.NOW
    saved = unit.token
    assert runner._when_updated(unit) is Update.AT_STEP
    del saved
    assert runner._when_updated(unit) is Update.NOW
    assert runner._when_updated(released(engine)) is Update.AT_STEP


def test_an_update_that_cannot_start_stays_pending(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As do those of the units after it: their gradients were taken already."""
    runner = engine.updates.runner
    units = [unit for unit in engine.units if unit.residency is Residency.RESIDENT][:2]
    assert len(units) == 2
    monkeypatch.setattr(engine.updates.gradients, "take_ready", lambda: [unit.index for unit in units])
    monkeypatch.setattr(runner._updating, "place", lambda unit, job: (_ for _ in ()).throw(UsageError("an edit")))
    with pytest.raises(UsageError, match="an edit"):
        runner.make_due(1.0)
    assert all(unit.due_update is not None for unit in units)
    for unit in units:
        unit.due_update = None
    engine.parts.schedule.step.end()


def test_a_unit_leaves_its_buffer_once_its_update_has_ended(engine: TrainingEngine) -> None:
    """Its write reads the buffer, which another unit is given next."""
    unit = resident(engine)
    before = pending_update(unit)
    engine.parts.store.release(unit)
    assert before.waited and unit.residency is Residency.RELEASED


def test_an_update_follows_a_save_or_the_update_before(engine: TrainingEngine, afters: list[Transfer]) -> None:
    unit, save = resident(engine), Pending()
    unit.update, unit.snapshot_read = None, save
    first = update(unit, early=False)
    unit.snapshot_read = DONE
    second = update(unit, early=False)
    engine.updates.runner.start_update(unit, first)
    assert afters == [save]
    engine.parts.runner.use(unit)
    engine.updates.runner.start_update(unit, second)
    assert afters[1] is first.progress.done


def test_an_update_follows_both_a_commit_and_the_update_before(engine: TrainingEngine, afters: list[Transfer]) -> None:
    """The commit may need other units' updates of that step, so it can end before this unit's or after it."""
    unit, commit = resident(engine), Pending()
    unit.snapshot_read = commit
    before = pending_update(unit)
    second = update(unit, early=False)
    engine.updates.runner.start_update(unit, second)
    afters[0].wait()
    assert before.waited and commit.waited


def test_an_edit_is_written_before_an_update_once_a_save_has_read_the_states(
    engine: TrainingEngine, edits: list[bool]
) -> None:
    unit = resident(engine)
    edit(unit)
    engine.updates.runner.start_update(unit, update(unit, early=False))
    assert edits == [True]


def test_an_edit_is_written_back_once_a_save_has_read_the_states(engine: TrainingEngine, edits: list[bool]) -> None:
    edit(resident(engine))
    engine.parts.store.release_all()
    assert edits == [True]


@pytest.mark.parametrize("leaves", ["to an update", "to its tier"])
def test_an_edit_is_in_its_tier_when_the_unit_leaves(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """Its buffer is reused then, and the update begins from the tier."""
    unit, store, writes = resident(engine), engine.parts.store, list[Pending]()
    write_back = UnitStates.write_back

    def watched(states: UnitStates, layout: UnitLayout, shard: torch.Tensor) -> Transfer:
        write_back(states, layout, shard).wait()
        writes.append(Pending())
        return writes[-1]

    monkeypatch.setattr(UnitStates, "write_back", watched)
    edit(unit)
    if leaves == "to an update":
        engine.updates.runner.start_update(unit, update(unit, early=False))
    else:
        store.release_all()
    assert [write.waited for write in writes] == [True]


@pytest.mark.parametrize("engine", [True], indirect=True, ids=["bf16"])
def test_masters_are_set_to_an_edit_once_it_has_left_the_device(engine: TrainingEngine) -> None:
    """Masters of other elements keep their bits."""
    unit, store = resident(engine), engine.parts.store
    (parameter, *_) = unit.parameters
    masters = get_full_fp32_param(parameter)
    engine.parts.runner.use(unit)
    with torch.no_grad():
        masters[0] = parameter[0].add_(1)
    store.release_all()
    assert torch.equal(get_full_fp32_param(parameter), masters)


@pytest.mark.parametrize("engine", [True], indirect=True, ids=["bf16"])
def test_a_16_bit_unit_arrives_once_its_update_is_written(engine: TrainingEngine) -> None:
    """Edits of its buffer are found by comparison with the tier."""
    unit, store = released(engine), engine.parts.store
    store.fetch(unit, holds=store.assign(unit, store.lease(unit)))
    written = pending_update(unit)
    engine.parts.runner.use(unit)
    assert written.waited


@pytest.mark.every_case
@pytest.mark.parametrize("which", [resident, released])
@pytest.mark.parametrize("how", ["settle", "release_all"])
def test_settling_and_releasing_wait_for_updates(
    engine: TrainingEngine, how: str, which: Callable[[TrainingEngine], Unit]
) -> None:
    unit = which(engine)
    done = pending_update(unit, refers=which is resident)
    {"settle": engine.updates.runner.settle, "release_all": engine.parts.store.release_all}[how]()
    assert done.waited


def test_an_edit_is_written_for_a_commit_once_the_update_before_is_written(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write the parameters to their tier, and the edit is the later one."""
    unit, write_back = resident(engine), UnitStates.write_back
    waited = list[bool]()

    def watched(states: UnitStates, layout: UnitLayout, shard: torch.Tensor) -> Transfer:
        waited.append(writing.waited)
        return write_back(states, layout, shard)

    monkeypatch.setattr(UnitStates, "write_back", watched)
    with torch.no_grad():
        unit.parameters[0].add_(1)
    writing = pending_update(unit)
    engine.parts.runner.edits.write()
    assert waited == [True]


@pytest.mark.parametrize("updated", [False, True])
def test_a_wait_for_a_fetch_counts_for_the_update_that_it_follows(
    engine: TrainingEngine, updated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, store = released(engine), engine.parts.store
    lanes, wait = list[str](), engine.parts.device.recorder.wait

    def watched(lane: str, reason: str) -> Any:
        lanes.append(lane)
        return wait(lane, reason)

    store.fetch(unit, holds=store.assign(unit, store.lease(unit)))
    if updated:
        pending_update(unit)
    monkeypatch.setattr(engine.parts.device.recorder, "wait", watched)
    engine.parts.runner._arrive(unit)
    assert lanes[-1] == ("update" if updated else "gather")
