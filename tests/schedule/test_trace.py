"""The trace: its answers about the next use, and how the tracer follows, deviates and records again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from math import inf
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinity.schedule import trace as trace_module
from infinity.schedule.trace import AHEAD, LONGEST, PARTS, Trace, Tracer, Walk

USES = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(
    lambda uses: [u for i, u in enumerate(uses) if i == 0 or u != uses[i - 1]]
)


def cycle(tracer: Tracer, uses: list[int], kind: str = "train") -> None:
    tracer.begin(kind)
    for use in uses:
        tracer.touch(use)


def walked(uses: list[int], position: int) -> Walk:
    walk = Walk(Trace(uses))
    for unit in uses[:position]:
        assert walk.follow(unit)
    return walk


@given(USES, st.data())
def test_next_use_by_search(uses: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(uses)))
    walk = walked(uses, position)
    for unit in range(6):
        endless = uses[position:] + uses
        assert walk.next_use(unit) == (endless.index(unit) if unit in endless else inf)
        assert walk.uses_again(unit) == (unit in uses[position:])


@given(USES, st.data())
def test_upcoming_units_are_the_nearest_first(uses: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(uses)))
    assert list(walked(uses, position).order) == list(dict.fromkeys(uses[position:] + uses))


@given(USES)
def test_a_walk_ends_at_the_end_and_follows_nothing_else(uses: list[int]) -> None:
    for position, unit in enumerate(uses):
        walk = walked(uses, position)
        assert not walk.ended and not walk.follow(unit + 1)
    assert walked(uses, len(uses)).ended and not walked(uses, len(uses)).follow(uses[0])


@given(USES)
def test_orders_of_first_and_last_use(uses: list[int]) -> None:
    trace = Trace(uses)
    assert trace.by_first_use() == sorted(set(uses), key=uses.index)
    assert trace.by_last_use() == sorted(set(uses), key=lambda unit: uses[::-1].index(unit), reverse=True)


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of the trace's module that `work` executes, a measure that other processes do not disturb."""
    count = 0

    def count_lines(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != trace_module.__file__:
            return None
        count += event == "line"
        return count_lines

    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def follow(uses: list[int], units: int) -> int:
    """Count the lines that recording and following a cycle executes, with the store's queries at each use."""
    tracer = Tracer()

    def step() -> None:
        for _ in range(2):
            tracer.begin("train")
            for unit in uses:
                tracer.touch(unit)
                list(islice(tracer.upcoming(), 4))
                for asked in range(min(units, 8)):
                    tracer.next_use(asked)
                tracer.finished_with(unit)
                tracer.passed(unit)

    return lines_run(step)


@pytest.mark.parametrize(
    "cycle_of",
    [
        pytest.param(lambda n: [2, *[0, 1] * n, 3], id="two units by turns"),
        pytest.param(lambda n: [*range(n), *reversed(range(n - 1))], id="many units"),
        pytest.param(lambda n: [u for i in range(n) for u in (0, i + 1)], id="one unit between all others"),
    ],
)
def test_work_is_linear_in_uses(cycle_of: Callable[[int], list[int]]) -> None:
    small, large = cycle_of(100), cycle_of(400)
    ratio = follow(large, len(set(large))) / follow(small, len(set(small)))
    assert ratio < 1.1 * len(large) / len(small)


def test_few_units_are_looked_at_ahead_however_many_there_are() -> None:
    tracer = Tracer()
    cycle(tracer, list(range(10 * AHEAD)))
    tracer.begin("train")
    assert list(tracer.upcoming()) == list(range(AHEAD))


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
    """The cycle follows the trace to its own end; the rest of the trace would only cause useless fetches."""
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


def test_steps_that_begin_nothing_are_cycles_of_their_own() -> None:
    tracer = Tracer()
    for _ in range(2):
        for unit in (0, 1, 0):
            tracer.touch(unit)
        tracer.end_step()
    assert tracer.follows and list(tracer.upcoming()) == [0, 1]
    assert tracer.known(PARTS).uses == [0, 1, 0] == tracer.known("train").uses


def test_the_end_of_a_step_that_began_a_cycle_is_not_the_end_of_the_cycle() -> None:
    tracer = Tracer()
    for _ in range(2):
        cycle(tracer, [0, 1])
        tracer.end_step()
        tracer.touch(2)  # read between two steps
    cycle(tracer, [0, 1, 2])
    assert tracer.follows and tracer.known("train").uses == [0, 1, 2]


def test_a_loop_that_stops_calling_the_root_has_cycles_again() -> None:
    tracer = Tracer()
    cycle(tracer, [0, 1])
    tracer.end_step()
    for _ in range(3):
        for unit in (2, 1):
            tracer.touch(unit)
        tracer.end_step()
    assert tracer.follows and list(tracer.upcoming()) == [2, 1]


def test_what_follows_an_exception_is_no_trace() -> None:
    tracer = Tracer()
    tracer.touch(0)
    tracer.forget()
    tracer.touch(1)
    tracer.begin("train")
    assert not tracer._traces


def test_a_cycle_without_an_end_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LONGEST >= 100_000
    monkeypatch.setattr(trace_module, "LONGEST", 10)
    tracer = Tracer()
    for unit in range(100):
        tracer.touch(unit % 7)
    assert len(tracer._recorded) == 10 and len(tracer._counts) == 7
    tracer.end_step()
    assert not tracer.follows and not tracer._traces


def test_expected_units_come_first_and_leave_the_trace_as_it_is() -> None:
    """Each cycle uses other experts (10 to 19) between 1 and 2, and the trace of 0, 1, 2 is followed all the time."""
    tracer = Tracer()
    for chosen in ([10, 14], [11], [10, 19, 12]):
        tracer.begin("eval")
        known = tracer.follows
        tracer.touch(0)
        tracer.touch(1)
        tracer.expect(chosen)
        assert list(tracer.upcoming())[: len(chosen)] == chosen
        assert list(tracer.upcoming())[len(chosen) :] == ([2, 0, 1] if known else [])
        distances = [tracer.next_use(unit) for unit in (*chosen, 2)]
        assert (distances == sorted(distances) and len({*distances}) == len(distances)) or not known
        for unit in chosen:
            assert tracer.touch(unit) and tracer.last == unit and not tracer.touch(unit)
        tracer.touch(1)  # the block goes on
        tracer.touch(2)
        assert tracer.follows == known
    assert tracer.known("eval").uses == [0, 1, 2]


def test_expected_units_are_forgotten_when_another_is_used() -> None:
    tracer = Tracer()
    tracer.begin("eval")
    tracer.expect([10, 11])
    tracer.touch(3)
    assert not list(tracer.upcoming())
    tracer.touch(10)
    tracer.begin("eval")
    assert tracer.known("eval").uses == [3, 10]
