"""The trace: the order in which a step uses units, recorded while it runs.

The trace is only a hint: if a step deviates from it, units are fetched on demand and the trace is recorded again. Each
use and each query for the next use takes constant time, independent of the length of the trace and the number of units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import inf

PARTS = "parts"
"""Kind of a cycle without a forward of the root: the loop called parts of the model directly."""

LONGEST = 1 << 18
"""Largest number of uses recorded in a cycle, which bounds its memory. A longer cycle leaves no trace."""

AHEAD = 32
"""Largest number of units that `upcoming` returns."""

_HEAD = -1


class Trace:
    """A recorded cycle of uses: unit indices without consecutive repeats. counts: unit → uses, repeats included."""

    def __init__(self, uses: list[int], counts: dict[int, int] | None = None) -> None:
        self.uses = uses
        self.counts = Counter(uses) if counts is None else counts
        self.following = [0] * len(uses)
        """Position of a use → position of the next use of the same unit; from `len(uses)` on, in the next cycle."""
        self.behind = [_HEAD] * len(uses)
        """Position of a use → the unit that precedes the used unit in the order of next uses; `_HEAD` if none does."""
        self.first: dict[int, int] = {}
        """unit → position of its first use in the cycle, in ascending order."""
        for position, unit in enumerate(uses):
            self.first.setdefault(unit, position)
        # Backwards through the cycle. Before a use, its unit is first in the order of next uses; after it, the unit
        # follows the recorded unit.
        order = _Order(self.first)
        later = {unit: len(self.uses) + position for unit, position in self.first.items()}
        for position in range(len(self.uses) - 1, -1, -1):
            unit = self.uses[position]
            self.following[position], later[unit] = later[unit], position
            self.behind[position] = order.to_front(unit)

    def by_first_use(self) -> list[int]:
        return list(self.first)

    def by_last_use(self) -> list[int]:
        return list(dict.fromkeys(reversed(self.uses)))[::-1]


class _Order:
    """Order of units, as a doubly linked list."""

    def __init__(self, units: Iterable[int]) -> None:
        self.after: dict[int, int] = {}
        self._before: dict[int, int] = {}
        last = _HEAD
        for unit in units:
            self.after[last], self._before[unit] = unit, last
            last = unit
        self.after[last], self._before[_HEAD] = _HEAD, last

    def to_front(self, unit: int) -> int:
        """Move `unit` to the front, and return the unit that preceded it."""
        before, after = self._before[unit], self.after[unit]
        self.after[before], self._before[after] = after, before
        self._insert(unit, _HEAD)
        return before

    def from_front(self, behind: int) -> None:
        """Move the first unit to the place after `behind`."""
        unit = self.after[_HEAD]
        after = self.after[unit]
        self.after[_HEAD], self._before[after] = after, _HEAD
        self._insert(unit, behind)

    def _insert(self, unit: int, behind: int) -> None:
        after = self.after[behind]
        self.after[behind], self.after[unit] = unit, after
        self._before[unit], self._before[after] = behind, unit

    def __iter__(self) -> Iterator[int]:
        unit = self.after[_HEAD]
        while unit != _HEAD:
            yield unit
            unit = self.after[unit]


class Walk:
    """Position in a trace, and the order of next uses from there."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.position = 0
        self._next = dict(trace.first)
        self.order = _Order(trace.first)
        """The distinct units in the order of their next uses, wrapping into the next cycle."""

    @property
    def ended(self) -> bool:
        return self.position == len(self.trace.uses)

    def follow(self, unit: int) -> bool:
        """Advance and return True if the trace uses `unit` at this position; otherwise return False."""
        position, trace = self.position, self.trace
        if position == len(trace.uses) or trace.uses[position] != unit:
            return False
        self._next[unit] = trace.following[position]
        self.order.from_front(trace.behind[position])
        self.position = position + 1
        return True

    def next_use(self, unit: int) -> float:
        """Return the number of uses until `unit` is used, continuing into the next cycle; inf if it never is."""
        return self._next.get(unit, inf) - self.position

    def uses_again(self, unit: int) -> bool:
        """Return True if this cycle uses `unit` at this position or later."""
        return self._next.get(unit, inf) < len(self.trace.uses)


class Tracer:
    """Follows the uses of one step against the trace of steps of the same kind ("train", "eval")."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}
        self._kind = PARTS
        self._begun = False
        """True if a cycle has begun since the last step ended."""
        self._recorded: list[int] = []
        self._counts: dict[int, int] = {}
        self._walk: Walk | None = None
        self.cycle = 0
        """Number of cycles begun."""
        self.last: int | None = None
        self.clock = 0
        self.recency: dict[int, int] = {}
        self._last_recorded: int | None = None
        self._expected: list[int] = []
        """Units that the data of this cycle chose to be used next, in order. Their uses are not recorded."""
        self._coming: list[int] = []
        """The expected units after the one in use."""

    def expect(self, units: Iterable[int]) -> None:
        """Note that `units` are used next, in order, and perhaps in no other cycle. The trace continues after them."""
        self._expected = self._coming = list(units)

    def begin(self, kind: str) -> None:
        """Start a new cycle. The previous one becomes the trace of its kind if it deviated from the known trace."""
        self._settle()
        self._begun = True
        self._start(kind)

    def end_step(self) -> None:
        """Record the end of a step. It counts as a cycle if none began in it, since the loop called only parts of the
        model."""
        if not self._begun:
            self.begin(PARTS)
        self._begun = False

    def forget(self) -> None:
        """Discard the recorded uses of a cycle that an exception cut short."""
        self._start("")

    def _start(self, kind: str) -> None:
        self._kind = kind
        self.cycle += 1
        self._recorded = []
        self._counts = {}
        trace = self._traces.get(kind)
        self._walk = None if trace is None else Walk(trace)
        self.last = self._last_recorded = None
        self._expected = self._coming = []

    def _settle(self) -> None:
        walk = self._walk
        followed = walk is not None and walk.ended and self._counts == walk.trace.counts
        if self._kind and 0 < len(self._recorded) < LONGEST and not followed:
            self._traces[self._kind] = Trace(self._recorded, self._counts)

    def touch(self, unit: int) -> bool:
        """Record a use of `unit`. Return False for a consecutive repeat."""
        news = unit != self.last
        if unit in self._expected:
            self._coming = self._expected[self._expected.index(unit) + 1 :]
        else:
            self._expected = self._coming = []
            self._counts[unit] = self._counts.get(unit, 0) + 1
            if unit != self._last_recorded:
                self._record(unit)
        if news:
            self.last = unit
            self.clock += 1
            self.recency[unit] = self.clock
        return news

    def _record(self, unit: int) -> None:
        self._last_recorded = unit
        if len(self._recorded) < LONGEST:
            self._recorded.append(unit)
        if self._walk is not None and not self._walk.follow(unit):
            self._walk = None

    def known(self, kind: str) -> Trace:
        """Return the trace of `kind`, or the uses recorded so far of its first cycle; may be empty."""
        for name in (kind, PARTS):
            if name in self._traces:
                return self._traces[name]
        return Trace(self._recorded if self._kind in (kind, PARTS) else [])

    @property
    def follows(self) -> bool:
        """True if a trace is known and this cycle has followed it so far."""
        return self._walk is not None

    def next_use(self, unit: int) -> float:
        """Return the number of uses until the next use of `unit`; without a trace, the number since its last (LRU).

        Negative for units that are expected, which come before all others.
        """
        if unit in self._coming:
            return self._coming.index(unit) - len(self._coming)
        if self._walk is not None:
            return self._walk.next_use(unit)
        return self.clock - self.recency.get(unit, 0)

    def finished_with(self, unit: int) -> bool:
        """Return True if this cycle has used `unit` exactly as often as the trace, consecutive repeats included.

        False without a trace.
        """
        walk = self._walk
        if walk is None or walk.uses_again(unit):
            return False
        return self._counts.get(unit, 0) == walk.trace.counts.get(unit, 0)

    def passed(self, unit: int) -> bool:
        """Return True if the trace has no further use of `unit` in this cycle. False without a trace."""
        return self._walk is not None and not self._walk.uses_again(unit)

    def order(self) -> Iterator[int]:
        """Return the distinct units in the order of their next uses: those expected, then those of the trace."""
        known = () if self._walk is None else self._walk.order
        return (
            chain(self._coming, (unit for unit in known if unit not in self._coming)) if self._coming else iter(known)
        )

    def by_first_use(self) -> Iterator[int]:
        """Return the units of the trace in the order of their first uses in a cycle. Nothing without a trace."""
        return iter(()) if self._walk is None else iter(self._walk.trace.first)

    def upcoming(self) -> Iterator[int]:
        """Return the next `AHEAD` distinct units, nearest first."""
        return islice(self.order(), AHEAD)
