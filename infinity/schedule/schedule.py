"""The schedule: decides what happens to units, and when. Pure: it moves no bytes, and knows units by their index.

Events come in: a unit is used, a gradient arrives, a backward begins or ends, a step ends. Decisions come out: which
units to fetch ahead, which buffer to take, which gradients to reduce, and when to update a unit. `Runner`
(`infinity.engine.runner`) reports the events and carries the decisions out. The store of units asks whose buffer to
take.

Several ranks have to fetch, evict and reduce alike, since a fetch and a reduction are collectives. So with several
ranks these decisions follow from the trace and the plan alone. Ranks may differ in whether a unit is updated now:
`UnitStore.release_passed` keeps the free buffers alike. A rule that counts updates could therefore differ between
ranks; the plan chooses units instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum

from infinity.schedule.step import Step
from infinity.schedule.trace import Tracer


class Update(Enum):
    """When a unit whose gradient is complete is updated."""

    NOW = "during backward: the rest of the step needs neither its parameters nor a norm over all gradients"
    AT_STEP = "by engine.step(), which starts it, or leaves it to the next use of the unit"


class Arrivals:
    """When the gradient of a unit is complete: by the number of its arrivals in the running backward, and by the units
    that backward has passed.

    One rank asks the graph that backward executes, from the number of arrivals on that completed the unit the last
    time: the query takes time. Several ranks have to send gradients in the same order, although the number of gradients
    of a unit may differ between them (experts without tokens on a rank). They follow the units in use, which do not
    differ.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """unit → its arrivals in this backward."""
        self._before: dict[int, int] = {}
        """unit → its arrivals in the last backward."""
        self._passed: set[int] = set()
        """Units past their last use in this backward."""
        self._unpredictable: set[int] = set()
        """Units that ever received a gradient after their last use."""
        self._predictable: set[int] = set()
        """Units that were passed in an earlier backward and are not in `_unpredictable`."""
        self._cleared = False

    def __contains__(self, unit: int) -> bool:
        return unit in self._counts

    @property
    def any(self) -> bool:
        """True if gradients have arrived in a backward that has not ended."""
        return bool(self._counts)

    def add(self, unit: int) -> None:
        """Count a gradient."""
        self._counts[unit] = self._counts.get(unit, 0) + 1
        if unit in self._passed:
            self._unpredictable.add(unit)

    def note_cleared(self) -> None:
        """Count this backward, although a user's hook has used and cleared a gradient."""
        self._cleared = True

    def may_be_complete(self, unit: int, parameters: int) -> bool:
        """Return whether the unit has as many gradients as in the last backward. parameters: their number otherwise."""
        return self._counts[unit] >= self._before.get(unit, parameters)

    def passing(self, units: Iterable[int], to: int, passed: Callable[[int], bool]) -> Iterator[int]:
        """Yield those of `units`, whose gradients are collected, that are complete as unit `to` is used.

        passed: unit → True if backward does not use it again. A unit that receives gradients after its last use, such
        as an embedding that saves nothing for backward, is complete when backward ends.
        """
        for unit in units:
            if unit != to and unit not in self._passed and passed(unit):
                self._passed.add(unit)
                if unit in self._predictable:
                    yield unit

    def end_backward(self, *, in_pieces: bool) -> bool:
        """Record the arrivals that complete each unit. Returns False if no gradient arrived, as with
        `torch.autograd.grad`. in_pieces: the backward was a piece of a micro-batch's, and other pieces have other
        units.
        """
        cleared, self._cleared = self._cleared, False
        passed, self._passed = self._passed, set()
        if not self._counts:
            return cleared
        self._before = {**(self._before if in_pieces else {}), **self._counts}
        self._predictable |= passed
        self._predictable -= self._unpredictable
        self._counts = {}
        return True

    def discard(self) -> None:
        """Forget a backward that did not end."""
        self._counts = {}
        self._passed = set()
        self._cleared = False


class Schedule:
    """Decisions for the units of one engine."""

    def __init__(
        self,
        nbytes: Sequence[int],
        buffer_bytes: Sequence[int],
        step: Step,
        *,
        prefetch_bytes: int,
        alone: bool,
        sums_whole: bool = False,
        in_forward: Collection[int] = (),
    ) -> None:
        """nbytes: padded bytes of each unit. buffer_bytes: those of its buffer. prefetch_bytes: of units fetched ahead.
        alone: there is one rank. sums_whole: gradients are summed over micro-batches before they are reduced.
        in_forward: units that are not updated during backward.
        """
        self.step = step
        self.trace = Tracer()
        self.arrivals = Arrivals()
        self.alone = alone
        self.prefetch_bytes = prefetch_bytes
        self._nbytes = nbytes
        self._buffer_bytes = buffer_bytes
        self._sums_whole = sums_whole
        self._in_forward = frozenset(in_forward)

    # -- parameters --------------------------------------------------------------------------------------------------

    def used(self, unit: int) -> bool:
        """A unit is used. Returns False if it was the last one used, so that nothing else changes."""
        return self.trace.touch(unit)

    def ahead(self) -> Iterator[int]:
        """Yield the units to have on the device, nearest first: the next ones of `prefetch_bytes` together.

        Nothing without a trace. The caller may start fetches in between.
        """
        left = self.prefetch_bytes
        for unit in self.trace.upcoming():
            left -= self._nbytes[unit]
            if left < 0:
                return
            yield unit

    def victims(self, unit: int, evictable: Iterable[int]) -> list[tuple[float, int]]:
        """Return (distance of next use, unit) for those of `evictable` whose buffer `unit` could take.

        The one needed furthest in future comes first (Belady 1966), or the least recently used without a trace. The
        unit in use is left out. Distances differ, except for units that the trace lacks (inf). [Note: why eviction
        follows Belady]
        """
        size, last, next_use = self._buffer_bytes[unit], self.trace.last, self.trace.next_use
        found = [(next_use(each), each) for each in evictable if self._buffer_bytes[each] == size and each != last]
        found.sort(reverse=True)
        return found

    def leaves_first(self, unit: int, buffers: int) -> bool:
        """Return whether the unit's buffer is taken by others before the unit is used again.

        buffers: number of buffers of the unit's size. False without a trace. Each unit of that size that is used
        before counts once.
        """
        size = self._buffer_bytes[unit]
        for other in self.trace.order():
            if other == unit or not buffers:
                break
            buffers -= self._buffer_bytes[other] == size
        else:
            return False
        return not buffers

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Return whether gradients are reduced in the running backward, instead of summed whole until the last one.

        In pieces (`Step.in_pieces`) a unit's next gradients follow at once, so on one rank they are added where they
        are collected.
        """
        if self.step.is_last_micro_step:
            return True
        return not self._sums_whole and not (self.step.is_in_pieces and self.alone)

    def gradient(self, unit: int, parameters: int) -> bool:
        """A gradient of `unit` was collected. Returns whether it may be the last one in this backward, which the graph
        then shows. parameters: number of the unit's. Always False on several ranks: see `passing`.
        """
        return self.reduces and self.alone and self.arrivals.may_be_complete(unit, parameters)

    def passing(self, collecting: Collection[int], to: int) -> list[int]:
        """Unit `to` is used: return those of `collecting` whose gradients several ranks reduce now (`Arrivals`)."""
        if self.alone or not self.arrivals.any:
            return []
        passed = list(self.arrivals.passing(collecting, to, self.trace.passed))
        return passed if self.reduces else []

    # -- updates -----------------------------------------------------------------------------------------------------

    def update(self, unit: int, *, may_be_read: bool, is_viewed: Callable[[], bool]) -> Update:
        """The last gradient of `unit` in this step was reduced: return when to update the unit.

        may_be_read: the unit's parameters are not in its buffer, or autograd saved some of them. is_viewed: returns
        whether something else views them, and may wait for that.
        """
        if not self.step.updates_early or unit in self._in_forward or may_be_read:
            return Update.AT_STEP
        if not self.alone:
            # The number of uses of a unit, and its views, may differ between ranks (experts); the order of units may
            # not. Views keep the former values (`UnitStore.place`).
            return Update.NOW if self.trace.passed(unit) else Update.AT_STEP
        return Update.NOW if self.trace.finished_with(unit) and not is_viewed() else Update.AT_STEP

    def first_updates(self, released: Callable[[int], bool]) -> Iterator[int]:
        """Yield the units that `engine.step()` updates first: those that the trace uses first.

        They keep or have got their buffers by then. Nothing while the backward needs another fetch, which comes first,
        and without a trace. released: unit → True if its parameters are not on the device.
        """
        if not self.trace.follows:
            return
        for unit in self.trace.upcoming():
            if self.trace.passed(unit):
                break
            if released(unit):
                return
        yield from self.trace.by_first_use()
