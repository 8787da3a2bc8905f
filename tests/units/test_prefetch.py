"""The units that prefetch starts with, compared with plain rules over the units in the order of their next uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from infinity.schedule.trace import AHEAD, Tracer
from infinity.units.prefetch import Ahead
from infinity.units.unit import Residency

UNITS = 40
USES = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=80).map(
    lambda uses: [use for n, use in enumerate(uses) if n == 0 or use != uses[n - 1]]
)
INDICES = st.sets(st.integers(0, UNITS - 1))
WITHOUT_BUFFER = (Residency.RELEASED, Residency.UPDATING)


class Kept(set[int]):
    """Indices of units with a kept buffer."""

    def __contains__(self, unit: Any) -> bool:
        return super().__contains__(unit.index)


def made(data: st.DataObject, uses: list[int], nbytes: int) -> tuple[Ahead, list[Any], list[int], Kept]:
    """Return what to test, its units, the units in the order of their next uses, and those with a kept buffer."""
    due = data.draw(INDICES)
    units: list[Any] = [
        SimpleNamespace(
            index=index,
            layout=SimpleNamespace(index=index, nbytes=data.draw(st.integers(1, 5))),
            residency=data.draw(st.sampled_from(Residency)),
            due_update=object() if index in due else None,
        )
        for index in range(UNITS)
    ]
    tracer = Tracer()
    for _ in range(2):
        tracer.begin("train")
        for use in uses:
            tracer.touch(use)
    tracer.begin("train")
    position = data.draw(st.integers(0, len(uses)))
    for use in uses[:position]:
        tracer.touch(use)
    order = list(dict.fromkeys(uses[position:] + uses))
    kept: Any = Kept(data.draw(INDICES))
    return Ahead(units, tracer, kept, nbytes), units, order, kept


@given(USES, st.integers(0, 60), st.data())
def test_units_to_fetch_are_those_that_fit_and_have_no_buffer(
    uses: list[int], nbytes: int, data: st.DataObject
) -> None:
    """Units that the caller evicts meanwhile are fetched again if their turn comes later."""
    ahead, units, order, _ = made(data, uses, nbytes)
    evicted = data.draw(st.dictionaries(st.sampled_from(order), st.sampled_from(order)))
    before = [unit.residency for unit in units]

    def plainly() -> list[int]:
        found, total = list[int](), 0
        for index in order[:AHEAD]:
            total += units[index].layout.nbytes
            if total > nbytes:
                break
            if units[index].residency in WITHOUT_BUFFER:
                found.append(index)
                fetch(index)
        return found

    def fetch(index: int) -> None:
        units[index].residency = Residency.FETCHING
        if index in evicted:
            units[evicted[index]].residency = Residency.RELEASED

    expected = plainly()
    for unit, residency in zip(units, before, strict=True):
        unit.residency = residency
    found = []
    for unit in ahead.to_fetch():
        found.append(unit.index)
        fetch(unit.index)
    assert found == expected


@given(USES, st.data())
def test_units_to_read_are_in_their_tier_alone(uses: list[int], data: st.DataObject) -> None:
    ahead, units, order, kept = made(data, uses, 0)
    in_tier = [
        index
        for index in order[:AHEAD]
        if units[index].residency is Residency.RELEASED and units[index].due_update is None and units[index] not in kept
    ]
    assert [layout.index for layout in ahead.to_read()] == in_tier


def test_nothing_is_next_without_a_trace() -> None:
    units: Any = [SimpleNamespace(layout=SimpleNamespace(nbytes=1), residency=Residency.RELEASED, due_update=None)]
    kept: Any = Kept()
    ahead = Ahead(units, Tracer(), kept, 1 << 30)
    assert not list(ahead.to_fetch()) and not list(ahead.to_read())
