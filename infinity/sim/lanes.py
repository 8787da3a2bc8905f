"""Lanes: resources that take time beside threads of the host, and the exposed time of each.

Streams of a device and drives take time. Time is exposed when the model did not compute, and belongs to the lanes that
it waited for. Each gap between two operations is followed back from the operation that ends it, to the transfer that it
waited for, to the work before that one. Each moment of the gap belongs to one lane, so that lanes and compute add up to
the step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from infinity.errors import ConfigError
from infinity.observe.timeline import LANES
from infinity.sim.clock import Clock, HostThread, Record
from infinity.tiers.transfer import Transfer, issued


class Ended:
    """A transfer that ends at a time that is known when it is issued: work on a stream."""

    __slots__ = ("_clock", "cause", "time")

    def __init__(self, clock: Clock, time: float, cause: Record | None) -> None:
        self._clock = clock
        self.time, self.cause = time, cause

    def wait(self) -> None:
        self._clock.wait_until(self.time, self.cause)

    def done(self) -> bool:
        return self._clock.now >= self.time


class Stream:
    """Work of a device in the order of its issue. Does not slow other streams."""

    def __init__(self, clock: Clock, lane: str) -> None:
        self.lane = lane
        self._clock = clock
        self._free = 0.0
        self._last: Record | None = None
        """The work that determined `_free`."""

    def follow(self, transfer: Transfer) -> None:
        """Order work that is issued from now on after `transfer`. Waits until host threads have issued the transfer."""
        transfer = issued(transfer)
        if not isinstance(transfer, Ended):
            transfer.wait()
        elif transfer.time > self._free:
            self._free, self._last = transfer.time, transfer.cause

    def run(self, seconds: float, lane: str = "", name: str = "", nbytes: int = 0) -> Record:
        """Issue work. Work that follows other work of its lane and name at once extends its record."""
        clock, lane, last = self._clock, lane or self.lane, self._last
        now = clock.now
        if self._free >= now:
            start, cause = self._free, last
        else:
            start, cause = now, clock.current.last
        if (
            last is not None
            and last.end == start == self._free
            and last.lane == lane
            and last.name == (name or clock.current.label)
            and not nbytes
            and not last.nbytes
        ):
            last.end += seconds
            last.alone += seconds
            self._free = last.end
            return last
        me = clock.current
        record = Record(lane, name or me.label, nbytes, me.name, start, start + seconds, cause, seconds)
        clock.records.append(record)
        self._free, self._last = record.end, record
        return record

    def reached(self) -> Ended:
        """Return a transfer that is done when the work issued so far has ended."""
        return Ended(self._clock, self._free, self._last)

    def join(self) -> tuple[float, Record | None]:
        """Return when work that is issued now would start, and the work that determines it."""
        now = self._clock.now
        return (self._free, self._last) if self._free >= now else (now, self._clock.current.last)


class Request:
    """A read or write of a drive."""

    mismatch = False

    def __init__(self, clock: Clock, record: Record) -> None:
        self._clock = clock
        self.record = record
        self.left = float(record.nbytes)
        self.has_ended = False
        self.waiting: list[HostThread] = []

    def wait(self) -> None:
        self._clock.turn()
        if not self.has_ended:
            self.waiting.append(self._clock.current)
            self._clock.block()

    def done(self) -> bool:
        self._clock.turn()
        return self.has_ended


READ, WRITE = "nvme_read", "nvme_write"


@dataclass(eq=False)
class Queue:
    """Reads or writes of one I/O engine, which the drive serves in their order."""

    direction: str
    """READ or WRITE."""
    lane: str
    requests: deque[Request] = field(default_factory=deque)
    rate: float = 0.0
    """Bytes/s of its oldest request, while it has one."""


class Drive:
    """A drive, or several as one. Reads and writes share it while both are under way, and so do queues of one
    direction.
    """

    def __init__(self, clock: Clock, read: float, write: float, mixed: float) -> None:
        """Bandwidths in bytes/s. mixed: of reads and writes together, in equal parts."""
        self.due = inf
        self._clock = clock
        self._rates = {READ: read, WRITE: write}
        self._mixed = mixed / 2
        self._queues: list[Queue] = []
        self._busy: list[Queue] = []
        """Queues with requests."""
        self._since = 0.0
        clock.sources.append(self)

    def queue(self, direction: str, lane: str) -> Queue:
        """Add a queue, whose requests are in `lane`."""
        self._queues.append(Queue(direction, lane))
        return self._queues[-1]

    def submit(self, queue: Queue, name: str, nbytes: int) -> Request:
        clock = self._clock
        clock.turn()
        me = clock.current
        record = Record(queue.lane, name, nbytes, me.name, me.time, inf, me.last)
        clock.records.append(record)
        clock.submitted.append(record)
        request = Request(clock, record)
        self._advance(me.time)
        queue.requests.append(request)
        if len(queue.requests) == 1:
            self._share()
        self._plan()
        return request

    def complete(self) -> None:
        time = self.due
        self._advance(time)
        queue = min(self._busy, key=_remaining)
        requests = queue.requests
        ended = requests.popleft()
        ended.record.end = time
        ended.has_ended = True
        if requests:
            requests[0].record.start, requests[0].record.cause = time, ended.record
        else:
            self._share()
        self._plan()
        for thread in ended.waiting:
            self._clock.wake(thread, time, ended.record)

    def _share(self) -> None:
        """Divide the drive between the queues that have requests."""
        self._busy = [queue for queue in self._queues if queue.requests]
        for queue in self._busy:
            sharing = sum(other.direction == queue.direction for other in self._busy)
            queue.rate = (self._rates[queue.direction] if sharing == len(self._busy) else self._mixed) / sharing

    def _advance(self, time: float) -> None:
        passed, self._since = time - self._since, time
        for queue in self._busy:
            queue.requests[0].left -= passed * queue.rate

    def _plan(self) -> None:
        self.due = self._since + min(map(_remaining, self._busy)) if self._busy else inf
        self._clock.expect(self.due)


def measured(drive: Drive | None, held: str) -> Drive:
    """Return `drive`. held: the data on it, for the error. Raises ConfigError if its bandwidths are unknown."""
    if drive is None:
        raise ConfigError(
            f"{held} are on nvme, and the bandwidths lack nvme_read or nvme_write: measure them with "
            "infinity bench-links"
        )
    return drive


def _remaining(queue: Queue) -> float:
    """Return the seconds that the oldest request of a queue takes if nothing changes."""
    left = queue.requests[0].left
    return left / queue.rate if left > 0.0 else 0.0


class DriveEngine:
    """Reads and writes of a tier, in place of the native I/O engine, whose bytes it counts."""

    def __init__(self, drive: Drive, lane: str = "") -> None:
        """lane: of all requests; default: by their direction."""
        self.bytes_read = self.bytes_written = 0
        self._drive = drive
        self._reads, self._writes = (drive.queue(direction, lane or direction) for direction in (READ, WRITE))

    def read(self, name: str, nbytes: int) -> Request:
        self.bytes_read += nbytes
        return self._drive.submit(self._reads, name, nbytes)

    def write(self, name: str, nbytes: int) -> Request:
        self.bytes_written += nbytes
        return self._drive.submit(self._writes, name, nbytes)

    def register(self, address: int, nbytes: int) -> bool:
        """Return False: no buffer has an address."""
        return False

    def close(self) -> None:
        """Nothing is open."""


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
