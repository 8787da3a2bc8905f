"""The trace: what it says about the next use, and how the tracer follows, departs and records anew."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.trace import Trace, Tracer

USES = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(
    lambda uses: [u for i, u in enumerate(uses) if i == 0 or u != uses[i - 1]]
)


def cycle(tracer: Tracer, uses: list[int], kind: str = "train") -> None:
    tracer.begin(kind)
    for use in uses:
        tracer.touch(use)


@given(USES, st.data())
def test_next_use_by_search(uses: list[int], data: st.DataObject) -> None:
    trace = Trace(uses)
    position = data.draw(st.integers(0, len(uses)))
    unit = data.draw(st.integers(0, 5))
    endless = uses[position:] + uses
    expected = endless.index(unit) if unit in endless else inf
    assert trace.next_use(unit, position) == expected
    assert trace.used_from(unit, position) == (unit in uses[position:])


@given(USES, st.data())
def test_upcoming_units_are_the_nearest_first(uses: list[int], data: st.DataObject) -> None:
    trace = Trace(uses)
    position = data.draw(st.integers(0, len(uses)))
    found = list(trace.upcoming(position))
    assert sorted(found) == sorted(set(uses))
    distances = [trace.next_use(unit, position) for unit in found]
    assert distances == sorted(distances)


@given(USES, USES)
def test_a_second_cycle_follows_the_first_or_records_itself(first: list[int], second: list[int]) -> None:
    tracer = Tracer()
    cycle(tracer, first)
    assert not tracer.follows and list(tracer.upcoming()) == []
    cycle(tracer, second)
    assert tracer.follows == (first[: len(second)] == second)
    tracer.begin("train")
    assert next(tracer.upcoming()) == second[0]
    assert tracer._traces["train"].uses == second


def test_repeats_count_once_in_the_order_and_each_in_the_number() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1, 1, 1, 0])
    tracer.begin("train")
    assert tracer._traces["train"].uses == [0, 1, 0]
    tracer.touch(0)
    for _ in range(2):
        tracer.touch(1)
        assert not tracer.finished_with(1)
    tracer.touch(1)
    assert tracer.finished_with(1) and not tracer.finished_with(0)
    tracer.touch(1)  # once more than in the cycle before
    assert not tracer.finished_with(1)


def test_nothing_is_finished_with_without_a_trace() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1])
    assert not tracer.finished_with(0) and not tracer.finished_with(7)
    cycle(tracer, [0, 2])  # departs
    assert not tracer.follows and not tracer.finished_with(0)


def test_kinds_have_traces_of_their_own() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1, 2], "train")
    cycle(tracer, [2, 0], "eval")
    cycle(tracer, [0, 1, 2], "train")
    assert tracer.follows
    tracer.begin("eval")
    assert list(tracer.upcoming()) == [2, 0]


def test_a_cycle_that_was_cut_short_is_no_trace() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1, 2])
    cycle(tracer, [0])
    tracer.forget()
    tracer.begin("train")
    assert list(tracer.upcoming()) == [0, 1, 2]


def test_a_shorter_cycle_replaces_the_trace() -> None:
    """It kept to the trace as far as it went, but the rest would be fetched for nothing."""
    tracer = Tracer()
    cycle(tracer, [0, 1, 2])
    cycle(tracer, [0, 1])
    tracer.begin("train")
    assert list(tracer.upcoming()) == [0, 1]


def test_without_a_trace_the_longest_unused_is_the_furthest() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1, 2, 0])
    assert tracer.next_use(1) > tracer.next_use(2) > tracer.next_use(0)
    assert tracer.next_use(9) > tracer.next_use(1)


def test_touch_says_whether_the_use_is_news() -> None:
    tracer = Tracer()
    tracer.begin("train")
    assert [tracer.touch(unit) for unit in (0, 0, 1, 0)] == [True, False, True, True]
