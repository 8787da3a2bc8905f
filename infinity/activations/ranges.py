"""Free ranges of a space of bytes that grows at its end."""

from __future__ import annotations

from bisect import bisect_left


class Ranges:
    """Free ranges of [0, end), disjoint and never adjacent."""

    def __init__(self) -> None:
        self.end = 0
        self._starts: list[int] = []
        """Starts of the free ranges, ascending."""
        self._stops: dict[int, int] = {}
        """Start → end of a free range."""

    def grow(self, nbytes: int) -> int:
        """Add `nbytes` at the end, which are not free yet. Returns where they start."""
        start, self.end = self.end, self.end + nbytes
        return start

    def take(self, nbytes: int) -> int | None:
        """Return the start of `nbytes` that were free: the first ones of the smallest range that holds them."""
        fitting = [(stop - start, start) for start, stop in self._stops.items() if stop - start >= nbytes]
        if not fitting:
            return None
        size, start = min(fitting)
        self._remove(start)
        if size > nbytes:
            self._insert(start + nbytes, start + size)
        return start

    def free(self, start: int, nbytes: int, *, walls: tuple[int, int] | None = None) -> None:
        """Free bytes [start, start + nbytes). walls: range within which they join free neighbours; default: all."""
        stop = start + nbytes
        low, high = walls or (0, self.end)
        at = bisect_left(self._starts, start)
        if stop < high and stop in self._stops:
            stop = self._remove(stop)
        if start > low and at and self._stops[before := self._starts[at - 1]] == start:
            self._remove(before)
            start = before
        self._insert(start, stop)

    def _insert(self, start: int, stop: int) -> None:
        self._starts.insert(bisect_left(self._starts, start), start)
        self._stops[start] = stop

    def _remove(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._stops.pop(start)
