"""The timeline of an engine or of a simulation: lanes, their work, and the file for Perfetto.

`infinity.observe.recorder` records real engines, `infinity.sim` simulated ones. Both write files of this form.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from infinity.tier_kind import TierKind

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


LANES = (
    "compute",
    "gather",
    "reduce",
    "host_to_device",
    "device_to_host",
    "nvme_read",
    "nvme_write",
    "update",
    "activations",
)
"""compute: the model. gather: collectives of parameters. reduce: gradients: collectives, sums and norms. update: the
optimizer step. activations: saved activations in other tiers.
"""


class Work(Protocol):
    """Work of a lane. start, end: seconds."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def thread(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Span:
    """`Work` that has been measured."""

    lane: str
    name: str
    nbytes: int
    thread: str
    """"model" for the threads of the training loop and of autograd; else the engine's name of the thread."""
    start: float
    end: float


@dataclass(frozen=True)
class StepSpan:
    """A step, from the end of the one before. exposed: lane → seconds in which the model waited for it."""

    start: float
    end: float
    exposed: Mapping[str, float]
    is_complete: bool = True
    """False: the recording ended before the step did."""


@dataclass(frozen=True)
class Sample:
    """Bytes in each tier at a time."""

    time: float
    nbytes: Mapping[TierKind, int]


def chrome_trace(
    work: Iterable[Work], steps: Sequence[StepSpan], samples: Iterable[Sample], *, rank: int = 0, name: str = ""
) -> dict[str, Any]:
    """Return a trace for ui.perfetto.dev or chrome://tracing. Work and samples outside of the steps are cut off.

    Each lane is a thread of the process `rank`, and more than one of the same name if its work overlaps. Bytes in tiers
    are counters. Times are microseconds from the start of the first step. name: of the process.
    """
    begin, end = (steps[0].start, steps[-1].end) if steps else (0.0, 0.0)
    events = [_named("process_name", rank, 0, name or f"rank {rank}")]
    events += (_named("thread_name", rank, _tid(lane, 0), lane) for lane in LANES)
    named = dict.fromkeys(LANES, 1)
    shown = [each for each in work if (each.nbytes or each.end > each.start) and each.end >= begin and each.start < end]
    for row, low, high, each in _in_rows(shown, begin, end):
        if row == named[each.lane]:
            named[each.lane] += 1
            events.append(_named("thread_name", rank, _tid(each.lane, row), each.lane))
        events.append(
            {
                "name": each.name or each.lane,
                "ph": "X",
                "pid": rank,
                "tid": _tid(each.lane, row),
                "ts": low / 1000,
                "dur": (high - low) / 1000,
                "args": {"bytes": each.nbytes, "thread": each.thread},
            }
        )
    for sample in samples:
        if begin <= sample.time <= end:
            time = _nanoseconds(sample.time - begin) / 1000
            for tier in TierKind:
                count = {"bytes": sample.nbytes.get(tier, 0)}
                events.append({"name": f"{tier} bytes", "ph": "C", "pid": rank, "tid": 0, "ts": time, "args": count})
    described = [
        {
            "start": each.start - begin,
            "seconds": each.end - each.start,
            "exposed": dict(each.exposed),
            "complete": each.is_complete,
        }
        for each in steps
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"steps": described}}


def _tid(lane: str, row: int) -> int:
    return LANES.index(lane) * 1000 + row


def _named(kind: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


def _nanoseconds(seconds: float) -> int:
    """Perfetto's resolution: work that follows other work at once must not overlap it by a rounding error."""
    return round(seconds * 1e9)


def _in_rows(work: Sequence[Work], begin: float, end: float) -> Iterator[tuple[int, int, int, Work]]:
    """Yield (row, start, end, work), in nanoseconds after `begin`. The work overlaps no other in this row of its
    lane.
    """
    free: dict[str, list[int]] = {}
    for each in sorted(work, key=lambda each: each.start):
        low, high = (_nanoseconds(min(max(time, begin), end) - begin) for time in (each.start, each.end))
        rows = free.setdefault(each.lane, [])
        row = next((number for number, until in enumerate(rows) if until <= low), len(rows))
        rows[row:] = [high, *rows[row + 1 :]]
        yield row, low, high, each
