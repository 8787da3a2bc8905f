"""Virtual time: the thread whose clock is least runs, whatever is known about the others beforehand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from infinity.sim.clock import BACKGROUND, FOREGROUND, Clock
from infinity.sim.lanes import Drive, DriveEngine
from infinity.sim.threads import VirtualPrimitives


class Watchful(Clock):
    """Looks at every thread and source at every call."""

    @property
    def _horizon(self) -> float:
        return -inf

    @_horizon.setter
    def _horizon(self, time: float) -> None:
        """Nothing is remembered."""


NAMES = "work", "adam", "norm", "spend", "sleep", "read", "write", "wait", "poll", "lock", "submit", "result"
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=12)


POOLS = {"adam": BACKGROUND, "norm": FOREGROUND}


def events(make: Callable[[], Clock], programs: list[list[tuple[str, int]]]) -> list[tuple[object, ...]]:
    """Run one program in the model's thread and the others in threads of their own. Returns what they saw, and when."""
    clock = make()
    primitives = VirtualPrimitives(clock, nullcontext)
    drive, lock = DriveEngine(Drive(clock, 2.0, 1.0, 1.5)), primitives.lock()
    helper = primitives.one_thread("infinity-grads", lambda: None)
    seen: list[tuple[object, ...]] = []

    def carry_out(name: str, calls: list[tuple[str, int]]) -> None:
        requests, tasks = [], []
        for call, number in calls:
            found: object = None
            if call == "work":
                clock.work("update", number)
            elif call in POOLS:
                clock.work("update", number, pool=POOLS[call])
            elif call == "spend":
                clock.spend(number)
            elif call == "sleep":
                clock.sleep("gather", number)
            elif call == "read":
                requests.append(drive.read(name, number))
            elif call == "write":
                requests.append(drive.write(name, number))
            elif call == "wait" and requests:
                requests.pop().wait()
            elif call == "poll" and requests:
                found = requests[-1].done()
            elif call == "lock":
                with lock:
                    clock.work("reduce", number)
            elif call == "submit":
                tasks.append(helper.submit(help_with, name, number))
            elif call == "result" and tasks:
                tasks.pop().result()
            seen.append((name, call, clock.now, found))

    def help_with(name: str, number: int) -> None:
        seen.append((name, "helped", clock.now))
        if number:
            clock.work("update", number)

    def run(name: str, calls: list[tuple[str, int]]) -> Callable[[], None]:
        return lambda: carry_out(name, calls)

    threads = [primitives.thread(run(f"infinity-{n}", calls), f"infinity-{n}") for n, calls in enumerate(programs[1:])]
    for thread in threads:
        thread.start()
    carry_out("model", programs[0])
    for thread in threads:
        thread.join()
    helper.shutdown()
    return seen


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=4), st.sampled_from([(), (0.25, 3)]))
def test_order_and_times_are_those_of_a_look_at_everything(
    programs: list[list[tuple[str, int]]], costs: tuple[Any, ...]
) -> None:
    assert events(partial(Clock, *costs), programs) == events(partial(Watchful, *costs), programs)


@pytest.mark.parametrize("make", [Clock, Watchful])
def test_a_thread_sees_what_ended_before(make: Callable[[], Clock]) -> None:
    seen = events(make, [[("read", 2), ("work", 0), ("poll", 0), ("work", 2), ("poll", 0)]])
    assert [found for _, call, _, found in seen if call == "poll"] == [False, True]


@pytest.mark.parametrize("make", [Clock, Watchful])
def test_helpers_begin_before_the_model_goes_on(make: Callable[[], Clock]) -> None:
    seen = events(make, [[("submit", 0), ("read", 0), ("submit", 0), ("read", 0)]])
    assert [call for _, call, *_ in seen] == ["submit", "helped", "read", "submit", "helped", "read"]
