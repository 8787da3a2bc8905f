"""Sets of seconds: ascending, disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the set of all seconds in `intervals`, of any order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of a set from `start` to `end`."""
    first = bisect_right(intervals, start, key=lambda each: each[1])
    last = bisect_left(intervals, end, key=lambda each: each[0])
    return [(max(low, start), min(high, end)) for low, high in intervals[first:last]]


def without(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return the seconds of a set that are not in `removed`."""
    found: list[Interval] = []
    for start, end in intervals:
        for low, high in within(removed, start, end):
            if low > start:
                found.append((start, low))
            start = high
        if end > start:
            found.append((start, end))
    return found


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
