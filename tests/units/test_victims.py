"""Eviction: the unit used furthest in the future, among those that cost nothing to evict."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import OpenEngine
from infinity.engine.training import TrainingEngine
from infinity.tiers.transfer import DONE
from infinity.units import binding
from infinity.units.unit import Residency, Unit
from support.beside import NVME
from support.lifetime import leased
from support.loops import parameters_of
from support.models import Linears, seeded, vector_batches
from support.seeded_disk import Schedule, use_seeded_disks

BATCHES = vector_batches(2)


class Busy:
    """A transfer for which no wait is allowed."""

    def wait(self) -> None:
        raise AssertionError("a unit was waited for although another one could make room")

    def done(self) -> bool:
        return False


class Writing:
    """The end of an update, which references the unit's buffer until it is waited for."""

    def __init__(self, unit: Unit) -> None:
        self.references = [unit.shard_bytes(0), unit.shard_bytes(0)]

    def wait(self) -> None:
        self.references.clear()

    def done(self) -> bool:
        return False


class Wide(nn.Linear):
    """A linear layer of four times the bytes."""

    def __init__(self) -> None:
        super().__init__(32, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, 32, 4).mean(-1)


class WithWide(Linears):
    """Layers of one size class, and a last one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7] = Wide()


def evaluated(
    make_engine: OpenEngine, make: Callable[[], nn.Module] = Linears
) -> tuple[TrainingEngine, list[Unit], Unit]:
    """Return an engine with a known trace, its units in the order of eviction, and an evicted one."""
    engine = make_engine(seeded(make), **NVME)
    for batch in BATCHES:
        with torch.no_grad():
            engine.module(*batch)
    store = engine.parts.store
    wanted = next(unit for unit in engine.units if unit.residency is Residency.RELEASED)
    return engine, [victim for _, victim in store.buffers.victims(wanted)], wanted


def keep_busy(unit: Unit, how: str, transfer: Any) -> None:
    if how == "update":
        unit.update = SimpleNamespace(done=transfer)  # type: ignore[assignment]
    else:
        unit.transfer = transfer


def settle(units: list[Unit]) -> None:
    for unit in units:
        unit.update = unit.transfer = None


HOW = pytest.mark.parametrize("how", ["update", "fetch"])


@HOW
def test_one_that_nothing_is_under_way_for_goes_first(how: str, make_engine: OpenEngine) -> None:
    engine, victims, wanted = evaluated(make_engine)
    assert len(victims) > 1
    for unit in victims[:-1]:
        keep_busy(unit, how, Busy())
    engine.parts.runner.use(wanted)
    assert [unit.residency for unit in victims] == [*[Residency.RESIDENT] * (len(victims) - 1), Residency.RELEASED]
    settle(victims)


@HOW
def test_one_whose_transfers_have_ended_is_not_busy(how: str, make_engine: OpenEngine) -> None:
    engine, victims, wanted = evaluated(make_engine)
    keep_busy(victims[0], how, DONE)
    engine.parts.runner.use(wanted)
    assert victims[0].residency is Residency.RELEASED
    settle(victims)


def test_one_that_is_being_updated_is_not_viewed(make_engine: OpenEngine) -> None:
    """The unit under update is the furthest of the busy ones, so the prefetched ones stay."""
    engine, victims, wanted = evaluated(make_engine)
    updated, *fetched = victims
    engine.parts.store.leave(updated)
    binding.unbind(updated)
    updated.move(Residency.UPDATING)
    keep_busy(updated, "update", Writing(updated))
    for unit in fetched:
        keep_busy(unit, "fetch", Busy())
    engine.parts.runner.use(wanted)
    assert updated.residency is Residency.RELEASED
    settle(victims)


@HOW
def test_a_prefetch_waits_for_none(how: str, make_engine: OpenEngine) -> None:
    """A prefetch takes a free unit's buffer or none."""
    engine, victims, _ = evaluated(make_engine)
    engine.parts.schedule.trace.begin("eval")
    engine.parts.schedule.prefetch_bytes = 9000
    before = {unit.index for unit in leased(engine)}
    for unit in victims:
        keep_busy(unit, how, Busy())
    engine.parts.runner.prefetch()
    assert {unit.index for unit in leased(engine)} == before
    settle(victims)
    engine.parts.runner.prefetch()
    assert {unit.index for unit in leased(engine)} != before


def test_a_prefetch_takes_no_viewed_buffer(make_engine: OpenEngine) -> None:
    """Evicting a viewed unit would cost one more buffer, which its view keeps."""
    engine, victims, _ = evaluated(make_engine)
    engine.parts.schedule.trace.begin("eval")
    engine.parts.schedule.prefetch_bytes = 9000
    before = {unit.index for unit in leased(engine)}
    views = [unit.flat()[:] for unit in victims]  # a view by the parameter would count as a use
    engine.parts.runner.prefetch()
    assert {unit.index for unit in leased(engine)} == before
    views.clear()
    engine.parts.runner.prefetch()
    assert {unit.index for unit in leased(engine)} != before


def test_a_prefetch_ends_before_its_buffer_is_reused(make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that deviates from its trace waits for the read into the buffer that it takes."""
    schedule = Schedule(0, drift=0)
    use_seeded_disks(monkeypatch, schedule)
    engine, _, _ = evaluated(make_engine)
    store, values = engine.parts.store, parameters_of(engine)
    store.release_all()
    engine.parts.schedule.trace.begin("eval")
    engine.parts.schedule.prefetch_bytes = 1 << 20
    engine.parts.runner.prefetch()
    reading = leased(engine)
    assert {unit.residency for unit in reading} == {Residency.FETCHING}
    *_, wanted = engine.units
    assert wanted.residency is Residency.RELEASED
    engine.parts.schedule.prefetch_bytes = 0
    engine.parts.runner.use(wanted)
    assert [unit.residency for unit in reading].count(Residency.RELEASED) == 1
    schedule.end()  # a read that nobody waited for is carried out now
    (weight,), (slot,) = wanted.parameters, wanted.layout.slots
    assert torch.equal(weight, values[slot.name])
    assert not store.kept.warned


def test_one_of_another_size_stays(make_engine: OpenEngine) -> None:
    """A unit of another size stays, although its next use is the furthest, since its buffer would not fit."""
    engine, victims, wanted = evaluated(make_engine, WithWide)
    trace, wide = engine.parts.schedule.trace, engine.units[7]
    trace.begin("eval")
    assert wide.residency is Residency.RESIDENT and wide.layout.nbytes > wanted.layout.nbytes
    assert all(
        engine.parts.schedule.trace.next_use(wide.index) > engine.parts.schedule.trace.next_use(unit.index)
        for unit in victims
    )
    engine.parts.runner.use(wanted)
    assert wide.residency is Residency.RESIDENT
    assert [unit.residency for unit in victims].count(Residency.RELEASED) == 1


def test_the_unit_in_use_and_those_that_are_held_stay(make_engine: OpenEngine) -> None:
    engine, (held, used, *_), wanted = evaluated(make_engine)
    store = engine.parts.store
    engine.parts.runner.hold(held)
    engine.parts.runner.use(used)
    victims = [victim for _, victim in store.buffers.victims(wanted)]
    engine.parts.runner.unhold(held)
    assert held not in victims and used not in victims
