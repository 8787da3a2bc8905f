"""Exposed time: when the model did not compute, and the lanes that it waited for.

Each gap between two operations is followed back from the operation that ends it, to the transfer that it waited for, to
the work before that one. Each moment of the gap belongs to one lane, so that lanes and compute add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.observe.timeline import LANES
from infinity.sim.clock import Record


@dataclass(frozen=True)
class Boundary:
    """The end of a step."""

    time: float
    cause: Record | None = field(repr=False)
    """The work that determined `time`."""
    submitted: int
    """Number of transfers submitted so far."""


def exposed(records: Sequence[Record], start: Boundary, end: Boundary) -> dict[str, float]:
    """Return lane → seconds from `start` to `end` in which the model waited for it."""
    total: dict[str, float] = defaultdict(float)
    reached = start.time
    for record in records:
        if record.lane != "compute" or record.thread != "model" or record.end <= start.time or record.start >= end.time:
            continue
        _blame(total, record.cause, reached, record.start)
        for lane, seconds in (record.lost or {}).items():
            total[lane] += seconds
        reached = max(reached, record.end)
    _blame(total, end.cause, reached, end.time)
    return {lane: total[lane] for lane in LANES if total[lane] > 0}


def _blame(total: dict[str, float], record: Record | None, since: float, until: float) -> None:
    """Add the time from `since` to `until` to the lanes of `record` and of the work that caused it."""
    while record is not None and until > since:
        if record.end < until:
            total["compute"] += until - max(record.end, since)  # the host issues operations
            until = record.end
            continue
        begins = max(record.start, since)
        if until > begins:
            total[record.lane] += until - begins
            until = begins
        record = record.cause
    if until > since:
        total["compute"] += until - since
