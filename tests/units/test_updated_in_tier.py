"""Units that are updated in host memory alone, whose buffer was given back as their update started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.engine.training import TrainingEngine
from infinity.tiers.transfer import Transfer
from infinity.units.states import UnitStates
from infinity.units.unit import Residency, Unit
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(3)


class Update:
    """An update that ends when it is waited for."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def done(self) -> bool:
        return self.waited


@pytest.fixture
def engine() -> Any:
    """An engine after two steps, which made a trace."""
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", prefetch_bytes=20_000), LateDevice()) as opened:
        train(opened, BATCHES[:2])
        opened.updates.runner.settle()
        yield opened


def under_update(engine: TrainingEngine, unit: Unit) -> Update:
    """Let an update of a released unit be under way."""
    assert unit.residency is Residency.RELEASED
    update = Update()
    unit.update = SimpleNamespace(done=update, computed=update)  # type: ignore[assignment]
    return update


def test_a_fetch_follows_the_update(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = next(unit for unit in engine.parts.units if unit.residency is Residency.RELEASED)
    update, ended = under_update(engine, unit), list[bool]()
    fetch = UnitStates.fetch

    def read(states: UnitStates, layout: Any, shard: torch.Tensor) -> Transfer:
        if layout is unit.layout:
            ended.append(update.waited)
        return fetch(states, layout, shard)

    monkeypatch.setattr(UnitStates, "fetch", read)
    engine.parts.runner.use(unit)
    assert ended == [True]


def test_prefetch_does_not_wait_for_the_update(engine: TrainingEngine) -> None:
    store = engine.parts.store
    engine(*BATCHES[2])  # the next unit of the trace is free to come
    store.release_all()
    unit = engine.parts.units[next(engine.parts.schedule.trace.upcoming())]
    update = under_update(engine, unit)
    engine.parts.runner.prefetch()
    assert not update.waited and unit.residency is Residency.RELEASED
    update.wait()
    engine.parts.runner.prefetch()
    assert unit.residency is Residency.FETCHING


def test_a_gradient_follows_the_update_of_a_prefetched_unit(engine: TrainingEngine) -> None:
    """The update may still read the gradient of the step before, which the next one replaces."""
    store = engine.parts.store
    engine(*BATCHES[2])
    store.release_all()
    engine.parts.runner.prefetch()
    unit = next(unit for unit in engine.parts.units if unit.residency is Residency.FETCHING)
    update = Update()
    unit.update = SimpleNamespace(done=update, computed=update)  # type: ignore[assignment]
    engine.updates.runner._finish_update(unit)
    assert update.waited


def test_a_gradient_follows_the_update_of_a_released_unit(engine: TrainingEngine) -> None:
    """It may arrive without a use: backward of a bias reads no parameter."""
    engine.parts.store.release_all()
    unit = engine.parts.units[1]
    update = under_update(engine, unit)
    engine.updates.runner._finish_update(unit)
    assert update.waited


CLIPPED = engine_config("cpu", "cpu", clip=0.1, prefetch_bytes=20_000, speculate=False)


def test_step_starts_the_updates_that_need_no_buffer() -> None:
    """Without drafts, clipping leaves all updates to step(). A host that computes updates at the next use instead."""
    for late in (True, False):
        with open_engine(seeded(Stack), CLIPPED, LateDevice() if late else None) as engine:
            train(engine, BATCHES[:2])  # a trace
            engine.updates.runner.settle()
            engine.backward(engine(*BATCHES[2]))
            released = [unit for unit in engine.parts.units if unit.residency is Residency.RELEASED]
            engine.step()
            assert len(released) > 2
            waiting = [unit for unit in released if unit.due_update is not None]
            # A unit that was evicted last is compared first.
            assert len(waiting) <= 1 if late else waiting == released


def test_updates_start_in_the_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(Stack):
        """Its last block is used first."""

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in reversed(self.blocks):
                x = block(x)
            return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())

    with open_engine(seeded(Reversed), CLIPPED, LateDevice()) as engine:
        train(engine, BATCHES[:2])
        engine.updates.runner.settle()
        engine.backward(engine(*BATCHES[2]))
        runner, started = engine.updates.runner, list[int]()
        start = runner.start_update
        monkeypatch.setattr(runner, "start_update", lambda unit, job: (started.append(unit.index), start(unit, job)))
        engine.step()
        first = list(engine.parts.schedule.trace.by_first_use())
        assert len(started) > 2 and started == [index for index in first if index in started]
        assert started != sorted(started)
