"""Exposed time: when the compute stream of a simulated run did not compute for the model, and what it waited for.

Each gap between two kernels is followed back from the kernel that ends it: to the copy that its stream waited for, to
the copy before that one, to the thread that issued it late, to the work of the thread that this one waited for. Each
moment of the gap belongs to exactly one of them, so that lanes and busy time add up to the time of the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from late.clock import LANES, Clock
from late.simulated import FINGERPRINTS, GRADIENTS

BUSY = "busy"
OWN = (FINGERPRINTS, GRADIENTS)
"""Kernels of the engine. The device computes, but not for the model."""
NAMES = {
    "to_device": "host to device",
    "from_device": "device to host",
    "compute": "other streams",
    "update": "update",
    "gradient": "gradients on host",
    "norm": "gradients on host",
    "copy": "copies on host",
    "infinity-update": "update",
    "infinity-grads": "gradients on host",
    "infinity-grad-writes": "gradients on host",
    "model": "host launches",
}
"""Lane, work or thread of the simulation → lane in results."""
LANE_NAMES = (*OWN, *dict.fromkeys(NAMES.values()))


class Part(NamedTuple):
    """A time of the compute stream. lane: `BUSY`, or of `LANE_NAMES`. site: where the model's thread waited, or ""."""

    lane: str
    site: str
    start: float
    end: float


@dataclass(frozen=True)
class Log:
    """Records of a run of `late.clock`."""

    records: np.ndarray
    names: Sequence[str]
    threads: Sequence[str]
    sites: Mapping[int, str]
    """record → source line at which the model's thread waited."""

    @classmethod
    def of(cls, clock: Clock) -> Log:
        return cls(clock.records(), clock.names(), [thread.name for thread in clock.threads], dict(clock.sites))

    @property
    def compute_stream(self) -> int:
        """The stream with the most compute."""
        kernels = self.records[self.records["lane"] == LANES.index("compute")]
        return int(np.argmax(np.bincount(kernels["stream"], weights=kernels["end"] - kernels["start"])))


class _Blame:
    """Follows a wait back through records and threads."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._hosts: dict[int, list[Any]] = defaultdict(list)
        """thread → (start, number) of its work and its waits."""
        for number in np.flatnonzero(log.records["lane"] >= LANES.index("work")):
            record = log.records[number]
            if LANES[record["lane"]] in ("work", "wait_for_record", "wait_for_thread"):
                self._hosts[int(record["thread"])].append((float(record["start"]), int(number)))
        for waits in self._hosts.values():
            waits.sort()

    def of_record(self, number: int, since: float) -> Iterator[Part]:
        """Yield what filled the time from `since` to the start of a record, latest first."""
        record = self._log.records[number]
        yield from self._before(record, since, "")

    def _before(self, record: Any, since: float, site: str) -> Iterator[Part]:
        while record["start"] > since:
            if record["bound"] < 0:
                yield from self.of_thread(int(record["thread"]), float(record["start"]), since, site)
                return
            record = self._log.records[record["bound"]]
            yield from self._itself(record, since, site)

    def _itself(self, record: Any, since: float, site: str) -> Iterator[Part]:
        if record["end"] > record["start"]:
            yield Part(NAMES[LANES[record["lane"]]], site, max(float(record["start"]), since), float(record["end"]))

    def of_thread(self, thread: int, until: float, since: float, site: str = "") -> Iterator[Part]:
        """Yield what a thread of the host did and waited for, latest first."""
        waits = self._hosts[thread]
        own = NAMES[self._log.threads[thread]]
        while until > since:
            place = bisect_left(waits, (until, -1)) - 1
            number = waits[place][1] if place >= 0 else -1
            record = self._log.records[number] if place >= 0 else None
            ended = since if record is None else max(since, float(record["end"]))
            if ended < until:
                yield Part(own, site, ended, until)
            if record is None or ended <= since:
                return
            until = float(record["start"])
            kind = LANES[record["lane"]]
            if kind == "work":
                yield Part(NAMES[self._log.names[record["name"]]], site, max(until, since), ended)
                continue
            here = site or self._log.sites.get(number, "")
            cause = int(record["bound"])
            if kind == "wait_for_thread":
                yield from self.of_thread(cause, ended, since, here)
                return
            awaited = self._log.records[cause]
            yield from self._itself(awaited, since, here)
            yield from self._before(awaited, since, here)
            return


def parts(log: Log, start: float, end: float) -> list[Part]:
    """Return the times of the compute stream from `start` to `end`, in order and without gaps."""
    records, blame = log.records, _Blame(log)
    kernels = (records["lane"] == LANES.index("compute")) & (records["stream"] == log.compute_stream)
    inside = np.flatnonzero(kernels & (records["end"] > start) & (records["start"] < end))
    found: list[Part] = []
    reached = start
    for number in inside:
        begin, stop = float(records[number]["start"]), float(records[number]["end"])
        if begin > reached:
            found += reversed(list(blame.of_record(int(number), reached)))
        name = log.names[records[number]["name"]]
        found.append(Part(name if name in OWN else BUSY, "", max(begin, start), min(stop, end)))
        reached = stop
    if reached < end:
        found += reversed(list(blame.of_thread(0, end, reached)))
    return found


def sums(times: Sequence[Part], start: float, end: float) -> dict[str, float]:
    """Return lane → seconds, from `start` to `end`. Busy time first."""
    total = dict.fromkeys((BUSY, *LANE_NAMES), 0.0)
    for part in times:
        total[part.lane] += max(0.0, min(part.end, end) - max(part.start, start))
    return total


def sites(times: Sequence[Part], start: float, end: float) -> dict[str, float]:
    """Return "lane, site" → exposed seconds, from `start` to `end`, the longest first."""
    total: dict[str, float] = defaultdict(float)
    for part in times:
        if part.lane != BUSY:
            seconds = max(0.0, min(part.end, end) - max(part.start, start))
            total[f"{part.lane}, {part.site or ('kernels' if part.lane in OWN else 'in order of streams')}"] += seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def occupied(log: Log, start: float, end: float) -> dict[str, float]:
    """Return lane → seconds from `start` to `end` in which it worked, beside compute or exposed."""
    total, records = {}, log.records
    inside = np.maximum(0.0, np.minimum(records["end"], end) - np.maximum(records["start"], start))
    for lane in ("to_device", "from_device"):
        total[NAMES[lane]] = float(inside[records["lane"] == LANES.index(lane)].sum())
    update = (records["lane"] == LANES.index("work")) & (records["name"] == log.names.index("update"))
    return total | {NAMES["update"]: float(inside[update].sum())}


def chrome_trace(log: Log, start: float, end: float) -> dict[str, Any]:
    """Return kernels, copies, host work and waits as a trace for chrome://tracing or ui.perfetto.dev."""
    events: list[dict[str, Any]] = []
    for number, record in enumerate(log.records):
        kind = LANES[record["lane"]]
        if kind == "mark" or record["end"] <= start or record["start"] >= end or record["end"] == record["start"]:
            continue
        on_host = kind in ("work", "wait_for_record", "wait_for_thread")
        row = log.threads[record["thread"]] if on_host else f"{kind} (stream {record['stream']})"
        name = {"wait_for_record": "wait for device", "wait_for_thread": "wait for thread"}.get(
            kind, log.names[record["name"]]
        )
        events.append({
            "name": name, "ph": "X", "pid": "host" if on_host else "device", "tid": row,
            "ts": float(record["start"]) * 1e6, "dur": float(record["end"] - record["start"]) * 1e6,
            "args": {"site": log.sites.get(number, "")},
        })  # fmt: skip
    return {"traceEvents": events}
