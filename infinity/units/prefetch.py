"""The units that prefetch starts with: those that the trace uses next and that have no buffer.

Both rules look at the next `AHEAD` units at most, and stop as early as they can, since they are asked at each use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.plan.layout import UnitLayout
from infinity.schedule.trace import Tracer
from infinity.units.kept import KeptBuffers
from infinity.units.unit import Residency, Unit


class Ahead:
    """The next units of the trace, nearest first. Without a trace there are none."""

    def __init__(self, units: Sequence[Unit], tracer: Tracer, kept: KeptBuffers, nbytes: int) -> None:
        """nbytes: of units to fetch ahead."""
        self.nbytes = nbytes
        self._units = units
        self._sizes = [unit.layout.nbytes for unit in units]
        self._tracer = tracer
        self._kept = kept

    def to_fetch(self) -> Iterator[Unit]:
        """Yield the units without present parameters on the device, among the next ones of `nbytes` together.

        The caller may start fetches in between.
        """
        units, sizes, left = self._units, self._sizes, self.nbytes
        released, updating = Residency.RELEASED, Residency.UPDATING
        for index in self._tracer.upcoming():
            left -= sizes[index]
            if left < 0:
                return
            residency = units[index].residency
            if residency is released or residency is updating:
                yield units[index]

    def to_read(self) -> Iterator[UnitLayout]:
        """Yield the layouts of units whose parameters are in their tier alone, with no write of them due.

        None is under way: a unit is evicted from its buffer after its writes, if the tier is not memory.
        """
        units, kept, released = self._units, self._kept, Residency.RELEASED
        for index in self._tracer.upcoming():
            unit = units[index]
            if unit.residency is released and unit.due_update is None and unit not in kept:
                yield unit.layout
