"""The schedule: decides what happens to units, and when. Pure: it moves no bytes, and knows units by their index.

Events come in: a unit is used, a gradient arrives, a backward begins or ends, a step ends. Decisions come out: which
units to fetch ahead, which buffer to take, which gradients to reduce, and when to update a unit. `Runner`
(`infinity.engine.runner`) reports the events and carries the decisions out. The store of units asks whose buffer to
take.

Several ranks have to fetch, evict and reduce alike, since a fetch and a reduction are collectives. So with several
ranks these decisions follow from the trace and the plan alone. Ranks may differ in whether a unit is updated now:
`UpdatingUnits.release_passed` keeps the free buffers alike. A rule that counts updates could therefore differ between
ranks; the plan chooses units instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum

from infinity.schedule.arrivals import Arrivals
from infinity.schedule.speculation import Speculation
from infinity.schedule.step import Step
from infinity.schedule.trace import Tracer


class Update(Enum):
    """When a unit whose gradient is complete is updated."""

    NOW = "during backward: the rest of the step needs neither its parameters nor a norm over all gradients"
    DRAFT = "during backward, in a second slot: the norm decides at engine.step() whether the update is kept"
    AT_STEP = "by engine.step(), which starts it, or leaves it to the next use of the unit"


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
        drafted: Collection[int] = (),
    ) -> None:
        """nbytes: padded bytes of each unit. buffer_bytes: those of its buffer. prefetch_bytes: of units fetched ahead.
        alone: there is one rank. sums_whole: gradients are summed over micro-batches before they are reduced.
        in_forward: units that are not updated during backward. drafted: units whose updates may be drafts.
        """
        self.step = step
        self.trace = Tracer()
        self.arrivals = Arrivals()
        self.speculation = Speculation(drafted)
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
            if unit not in self.speculation.drafted:  # its tier has the bytes of before until engine.step()
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
        drafts = self.speculation.may_draft(unit)
        if not (drafts or self.step.updates_early) or unit in self._in_forward:
            return Update.AT_STEP
        # The number of uses of a unit, and its views, may differ between ranks (experts); the order of units may not.
        if not (self.trace.finished_with(unit) if self.alone else self.trace.passed(unit)):
            return Update.AT_STEP
        if drafts:
            self.speculation.add(unit)  # on all ranks, although some may not make the draft
        # Views keep the former values (`UpdatingUnits.place`), which a draft that is taken back must not need.
        if may_be_read or ((drafts or self.alone) and is_viewed()):
            return Update.AT_STEP
        return Update.DRAFT if drafts else Update.NOW

    def by_first_use(self, units: Sequence[int]) -> list[int]:
        """Return `units` in the order of their first uses in a cycle, and last those that the trace lacks."""
        place = {unit: at for at, unit in enumerate(self.trace.by_first_use())}
        return sorted(units, key=lambda unit: place.get(unit, len(place)))

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
