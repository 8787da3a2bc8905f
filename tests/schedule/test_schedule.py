"""The schedule under random events: what it may decide, whatever the model does, and that ranks decide alike.

A small interpreter carries the decisions out as `Runner` does, without bytes. It knows what a plain step knows: which
uses and gradients are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from infinity.schedule.schedule import Schedule, Update
from infinity.schedule.step import Step

UNITS = 5
STEPS = 4


@dataclass
class Machine:
    """Units with `buffers` buffers of one size."""

    schedule: Schedule
    buffers: int
    resident: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    """Units updated during the present backward, in order."""
    reduced: list[int] = field(default_factory=list)
    """Units in the order of their reductions in the present step."""
    decisions: list[object] = field(default_factory=list)
    collecting: list[int] = field(default_factory=list)
    reduced_early: int = 0
    """Units reduced before the last backward ended."""

    def use(self, unit: int) -> None:
        assert unit not in self.updated, "a unit is used after its update in the same step"
        self.schedule.used(unit)
        for passed in self.schedule.passing(list(self.collecting), unit):
            assert passed != unit
            self.reduce(passed, viewed=False)
        if unit not in self.resident:
            self.fetch(unit)
        for ahead in self.schedule.ahead():
            if ahead not in self.resident and ahead not in self.updated:
                victims = self.schedule.victims(ahead, self.resident)
                room = len(self.resident) < self.buffers
                if not room and not (victims and victims[0][0] > self.schedule.trace.next_use(ahead)):
                    break
                self.fetch(ahead)

    def fetch(self, unit: int) -> None:
        if len(self.resident) == self.buffers:
            (_, victim), *others = self.schedule.victims(unit, self.resident)
            assert victim != self.schedule.trace.last, "the unit in use is evicted"
            distance = self.schedule.trace.next_use
            assert all(distance(victim) >= distance(other) for _, other in others), "not Belady's choice"
            self.resident.remove(victim)
            self.decisions.append(("evict", victim))
        self.resident.append(unit)
        self.decisions.append(("fetch", unit))

    def gradient(self, unit: int, *, of: int, expects: bool, viewed: bool) -> None:
        if unit not in self.collecting:
            self.collecting.append(unit)
        self.schedule.arrivals.add(unit)
        if self.schedule.gradient(unit, of) and not expects:
            self.reduce(unit, viewed=viewed)

    def reduce(self, unit: int, *, viewed: bool) -> None:
        self.collecting.remove(unit)
        self.reduced.append(unit)
        self.decisions.append(("reduce", unit))
        step = self.schedule.step
        if not step.is_last_micro_step:
            return
        may_be_read = unit not in self.resident
        if self.schedule.update(unit, may_be_read=may_be_read, is_viewed=lambda: viewed) is Update.NOW:
            assert unit in self.resident, "an update during backward works in the unit's buffer"
            assert not viewed or not self.schedule.alone, "a buffer that something views is updated"
            step.add_updated([unit])
            self.updated.append(unit)
            self.resident.remove(unit)
            self.decisions.append(("update", unit))

    def end_backward(self) -> None:
        if self.schedule.reduces:
            for unit in list(self.collecting):
                self.reduce(unit, viewed=False)
        counted = self.schedule.arrivals.end_backward(in_pieces=False)
        self.schedule.step.end_backward(counts=counted)

    def end_step(self) -> None:
        self.schedule.trace.end_step()
        self.schedule.step.end()
        self.updated, self.reduced = [], []


def machine(*, buffers: int, early: bool, alone: bool, accumulation: int, in_forward: set[int]) -> Machine:
    schedule = Schedule(
        [1] * UNITS,
        [1] * UNITS,
        Step(accumulation, early=early),
        prefetch_bytes=2,
        alone=alone,
        in_forward=in_forward,
    )
    return Machine(schedule, buffers)


def micro_batch(
    machine: Machine, order: list[int], skipped: set[int], viewed: set[int], gradients: Sequence[int] = (2,) * UNITS
) -> None:
    """A forward over `order`, and a backward in which the units of `skipped` receive no gradient. gradients: number of
    those of each other unit, which has two parameters.
    """
    machine.schedule.trace.begin("train")
    for unit in order:
        machine.use(unit)
    machine.schedule.step.begin_backward()
    for unit in reversed(order):
        machine.use(unit)
        if unit not in skipped:
            for number in reversed(range(gradients[unit])):
                machine.gradient(unit, of=2, expects=number > 0, viewed=unit in viewed)
    machine.reduced_early = len(machine.reduced)
    machine.end_backward()


ORDERS = st.permutations(range(UNITS))
UNITS_OF = st.sets(st.integers(0, UNITS - 1))


@settings(max_examples=300)
@given(ORDERS, UNITS_OF, UNITS_OF, UNITS_OF, st.integers(2, UNITS), st.booleans(), st.booleans(), st.integers(1, 2))
def test_each_decision_is_legal(
    order: list[int],
    skipped: set[int],
    viewed: set[int],
    in_forward: set[int],
    buffers: int,
    early: bool,
    alone: bool,
    accumulation: int,
) -> None:
    """No unit is updated before its last use, none is used after it, and each gradient is reduced once a backward."""
    run = machine(buffers=buffers, early=early, alone=alone, accumulation=accumulation, in_forward=in_forward)
    for _ in range(STEPS):
        for number in range(accumulation):
            run.reduced = []
            micro_batch(run, order, skipped, viewed)
            assert sorted(run.reduced) == sorted(set(order) - skipped)
            assert number + 1 == accumulation or not run.updated, "only the last micro-batch updates"
        assert not set(run.updated) & in_forward
        assert early or not run.updated
        run.end_step()


@settings(max_examples=200)
@given(ORDERS, UNITS_OF, st.lists(UNITS_OF, min_size=2, max_size=2), st.integers(2, UNITS), st.booleans())
def test_ranks_decide_alike(
    order: list[int], skipped: set[int], viewed: list[set[int]], buffers: int, early: bool
) -> None:
    """Views of parameters differ between ranks; fetches, evictions, reductions and updates do not."""
    runs = [machine(buffers=buffers, early=early, alone=False, accumulation=1, in_forward=set()) for _ in viewed]
    for _ in range(STEPS):
        for run, views in zip(runs, viewed, strict=True):
            micro_batch(run, order, skipped, views)
            run.end_step()
    assert runs[0].decisions == runs[1].decisions


@settings(max_examples=200)
@given(ORDERS, st.lists(st.lists(st.integers(1, 2), min_size=UNITS, max_size=UNITS), min_size=2, max_size=2))
def test_ranks_with_other_gradients_reduce_alike(order: list[int], numbers: list[list[int]]) -> None:
    """Experts without tokens on a rank receive fewer gradients there. From the third step on, all units but the last
    one used are reduced before backward ends.
    """
    runs = [machine(buffers=3, early=False, alone=False, accumulation=1, in_forward=set()) for _ in numbers]
    for step in range(STEPS):
        for run, counts in zip(runs, numbers, strict=True):
            micro_batch(run, order, set(), set(), counts)
            assert step < 2 or run.reduced_early >= UNITS - 1
            run.end_step()
    assert runs[0].decisions == runs[1].decisions


@given(ORDERS, st.integers(2, UNITS))
def test_a_known_order_is_updated_during_backward(order: list[int], buffers: int) -> None:
    """From the second step on, with nothing that views the parameters, every unit on the device is updated early."""
    run = machine(buffers=buffers, early=True, alone=True, accumulation=1, in_forward=set())
    for step in range(STEPS):
        micro_batch(run, order, set(), set())
        assert step == 0 or sorted(run.updated) == sorted(order)
        run.end_step()


def test_a_unit_leaves_its_buffer_first_if_others_need_it() -> None:
    run = machine(buffers=2, early=False, alone=True, accumulation=1, in_forward=set())
    for _ in range(2):
        run.schedule.trace.begin("eval")
        for unit in range(UNITS):
            run.schedule.used(unit)
    run.schedule.trace.begin("eval")
    run.schedule.used(0)
    assert run.schedule.leaves_first(0, 2) and not run.schedule.leaves_first(0, UNITS)
