"""An update that starts waits for whatever still uses the unit's buffer and its tiers."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.engine.training import TrainingEngine
from infinity.rules import Hyper
from infinity.tiers.transfer import DONE
from infinity.units.states import UnitStates
from infinity.units.unit import Residency, Unit
from infinity.update.job import Gradient, UpdateJob
from infinity.update.pipeline import UpdatePipeline
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(1)


class Reading:
    """A transfer that refers to a unit's buffer until it is waited for."""

    def __init__(self, unit: Unit | None = None) -> None:
        self.waited = False
        self._references = [] if unit is None else [unit.shard_bytes(0)]

    def wait(self) -> None:
        self.waited = True
        self._references.clear()

    def done(self) -> bool:
        return self.waited


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose updates end at once and change nothing."""

    def end(pipeline: UpdatePipeline, job: UpdateJob) -> None:
        job.target = None
        job.mark_computed(DONE)
        job.mark_done()

    config = engine_config("cpu", "cpu", prefetch_bytes=20_000)
    with open_engine(seeded(Stack), config, LateDevice()) as opened:
        opened.module(*BATCHES[0])
        opened.parts.store.settle()
        monkeypatch.setattr(UpdatePipeline, "submit", end)
        yield opened


def resident(engine: TrainingEngine) -> Unit:
    return next(unit for unit in engine.units if unit.residency is Residency.RESIDENT)


def update(unit: Unit, *, early: bool) -> UpdateJob:
    """early: with a gradient, as during backward."""
    gradient = Future[Gradient]() if early else None
    return UpdateJob(unit.layout, lambda: [], [Hyper(lr=0.1)], 1.0, 0, gradient)


def test_a_write_of_the_update_before_is_no_view(engine: TrainingEngine) -> None:
    """Ranks of a group start updates of units whose former update has not ended; its write is no reason to give the
    unit another buffer.
    """
    unit, store = resident(engine), engine.parts.store
    unit.job = SimpleNamespace(done=Reading(unit))  # type: ignore[assignment]
    assert unit.is_viewed()
    store.start_update(unit, update(unit, early=True))
    assert unit not in store.kept


def test_an_edit_is_written_after_a_save_has_read_the_states(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, save, waited = resident(engine), Reading(), list[bool]()
    unit.snapshot_read = save
    sync = UnitStates.sync_masters_from_edit

    def watched(states: UnitStates, edited: Unit) -> None:
        waited.append(save.waited)
        sync(states, edited)

    monkeypatch.setattr(UnitStates, "sync_masters_from_edit", watched)
    with torch.no_grad():
        unit.parameters[0].add_(1)
    engine.parts.store.start_update(unit, update(unit, early=False))
    assert waited == [True]


def test_an_update_follows_a_save_or_the_update_before(engine: TrainingEngine) -> None:
    unit, save = resident(engine), Reading()
    unit.job, unit.snapshot_read = None, save
    first, second = update(unit, early=False), update(unit, early=False)
    engine.parts.store.start_update(unit, first)
    assert first.after is save
    engine.parts.store.use(unit)
    engine.parts.store.start_update(unit, second)
    assert second.after is first.done
