"""The trace: the order in which a step uses units, recorded while it runs.

It is a hint, never a contract: a step that departs from it is served on demand and recorded anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from math import inf


class Trace:
    """A recorded cycle of uses: unit indices, consecutive repeats left out; `counts` has them in: unit → uses."""

    def __init__(self, uses: list[int], counts: dict[int, int] | None = None) -> None:
        self.uses = uses
        self.counts = Counter(uses) if counts is None else counts
        self._positions: dict[int, list[int]] = {}
        for position, unit in enumerate(uses):
            self._positions.setdefault(unit, []).append(position)

    def next_use(self, unit: int, position: int) -> float:
        """Uses from `position` until `unit` is used, going round to the next cycle; inf for a unit that never is."""
        uses = self._positions.get(unit)
        if not uses:
            return inf
        found = bisect_left(uses, position)
        if found < len(uses):
            return uses[found] - position
        return len(self.uses) - position + uses[0]

    def used_from(self, unit: int, position: int) -> bool:
        """Whether this cycle uses `unit` at `position` or later."""
        uses = self._positions.get(unit)
        return bool(uses) and uses[-1] >= position  # type: ignore[index]

    def by_first_use(self) -> list[int]:
        return sorted(self._positions, key=lambda unit: self._positions[unit][0])

    def by_last_use(self) -> list[int]:
        return sorted(self._positions, key=lambda unit: self._positions[unit][-1])

    def upcoming(self, position: int) -> Iterator[int]:
        """The distinct units that follow, nearest first, going round once."""
        seen: set[int] = set()
        for step in range(len(self.uses)):
            unit = self.uses[(position + step) % len(self.uses)]
            if unit not in seen:
                seen.add(unit)
                yield unit


class Tracer:
    """Follows the uses of one step against the trace of steps of the same kind ("train", "eval")."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}
        self._kind = ""
        self._recorded: list[int] = []
        self._counts: dict[int, int] = {}
        self._trace: Trace | None = None
        self._position = 0
        self.last: int | None = None
        self.clock = 0
        self.recency: dict[int, int] = {}

    def begin(self, kind: str) -> None:
        """A new cycle starts; the one before becomes the trace of its kind if it departed from what was known."""
        self._settle()
        self._kind = kind
        self._recorded = []
        self._counts = {}
        self._trace = self._traces.get(kind)
        self._position = 0
        self.last = None

    def forget(self) -> None:
        """The cycle was cut short by an exception: what it recorded is no trace."""
        self._recorded = []
        self._counts = {}
        self._kind = ""
        self._trace = None
        self.last = None

    def _settle(self) -> None:
        known = self._traces.get(self._kind)
        followed = (
            self._trace is not None and self._position == len(self._trace.uses) and self._counts == self._trace.counts
        )
        if self._recorded and not (known is not None and followed):
            self._traces[self._kind] = Trace(self._recorded, self._counts)

    def touch(self, unit: int) -> bool:
        """`unit` is used now. Returns whether that is news, False for one more use of the last unit."""
        self._counts[unit] = self._counts.get(unit, 0) + 1
        if unit == self.last:
            return False
        self.last = unit
        self.clock += 1
        self.recency[unit] = self.clock
        self._recorded.append(unit)
        if self._trace is not None:
            if self._position < len(self._trace.uses) and self._trace.uses[self._position] == unit:
                self._position += 1
            else:
                self._trace = None
        return True

    def known(self, kind: str) -> Trace:
        """The trace of that kind, or what of it has been recorded; empty if there is neither."""
        recorded = self._recorded if self._kind == kind else []
        return self._traces.get(kind) or Trace(recorded)

    @property
    def follows(self) -> bool:
        """Whether a trace is known and this cycle has kept to it so far."""
        return self._trace is not None

    def next_use(self, unit: int) -> float:
        """How far the next use is; without a trace, the longest unused counts as the furthest."""
        if self._trace is not None:
            return self._trace.next_use(unit, self._position)
        return self.clock - self.recency.get(unit, 0)

    def finished_with(self, unit: int) -> bool:
        """Whether this cycle has used `unit` exactly as often as the trace did, consecutive repeats included.

        False without a trace.
        """
        if self._trace is None or self._trace.used_from(unit, self._position):
            return False
        return self._counts.get(unit, 0) == self._trace.counts.get(unit, 0)

    def passed(self, unit: int) -> bool:
        """Whether this cycle uses `unit` no more, by the trace. False without a trace."""
        return self._trace is not None and not self._trace.used_from(unit, self._position)

    def upcoming(self) -> Iterator[int]:
        if self._trace is not None:
            yield from self._trace.upcoming(self._position)
