"""The units that prefetch starts with, compared with a plain rule over the units in the order of their next uses."""

from __future__ import annotations

from hypothesis import given, strategies as st

from infinity.schedule.schedule import Schedule
from infinity.schedule.step import Step
from infinity.schedule.trace import AHEAD

UNITS = 40
USES = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=80).map(
    lambda uses: [use for n, use in enumerate(uses) if n == 0 or use != uses[n - 1]]
)
SIZES = st.lists(st.integers(1, 5), min_size=UNITS, max_size=UNITS)


def schedule_of(sizes: list[int], nbytes: int) -> Schedule:
    return Schedule(sizes, sizes, Step(1, early=False), prefetch_bytes=nbytes, alone=True)


@given(USES, SIZES, st.integers(0, 60), st.data())
def test_units_ahead_are_the_next_ones_that_fit(
    uses: list[int], sizes: list[int], nbytes: int, data: st.DataObject
) -> None:
    schedule = schedule_of(sizes, nbytes)
    for _ in range(2):
        schedule.trace.begin("train")
        for use in uses:
            schedule.used(use)
    schedule.trace.begin("train")
    position = data.draw(st.integers(0, len(uses)))
    for use in uses[:position]:
        schedule.used(use)
    expected, total = list[int](), 0
    for unit in list(dict.fromkeys(uses[position:] + uses))[:AHEAD]:
        total += sizes[unit]
        if total > nbytes:
            break
        expected.append(unit)
    assert list(schedule.ahead()) == expected


def test_nothing_is_ahead_without_a_trace() -> None:
    assert not list(schedule_of([1] * UNITS, 1 << 30).ahead())
