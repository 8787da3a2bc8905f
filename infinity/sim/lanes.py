"""Resources that take time beside threads of the host: streams of a device, and drives."""

from __future__ import annotations

from collections import deque
from math import inf

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
        """Start work that is issued from now on after `transfer`. Waits for the part of host threads."""
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


class Drive:
    """A drive, or several as one: reads and writes each in their order, and both share the drive while both are under
    way.
    """

    def __init__(self, clock: Clock, read: float, write: float, mixed: float) -> None:
        """Bandwidths in bytes/s. mixed: of reads and writes together, in equal parts."""
        self.due = inf
        self.bytes_read = self.bytes_written = 0
        self._clock = clock
        self._rates = {READ: read, WRITE: write}
        self._mixed = mixed / 2
        self._queues: dict[str, deque[Request]] = {READ: deque(), WRITE: deque()}
        self._since = 0.0
        clock.sources.append(self)

    def read(self, name: str, nbytes: int) -> Request:
        self.bytes_read += nbytes
        return self._submit(READ, name, nbytes)

    def write(self, name: str, nbytes: int) -> Request:
        self.bytes_written += nbytes
        return self._submit(WRITE, name, nbytes)

    def close(self) -> None:
        """Nothing is open."""

    def _submit(self, lane: str, name: str, nbytes: int) -> Request:
        clock, queue = self._clock, self._queues[lane]
        clock.turn()
        me = clock.current
        record = Record(lane, name, nbytes, me.name, me.time, inf, me.last)
        clock.records.append(record)
        clock.submitted.append(record)
        request = Request(clock, record)
        self._advance(me.time)
        queue.append(request)
        self._plan()
        return request

    def complete(self) -> None:
        time = self.due
        self._advance(time)
        lane = min((lane for lane in self._queues if self._queues[lane]), key=self._remaining)
        queue = self._queues[lane]
        ended = queue.popleft()
        ended.record.end = time
        ended.has_ended = True
        if queue:
            queue[0].record.start, queue[0].record.cause = time, ended.record
        self._plan()
        for thread in ended.waiting:
            self._clock.wake(thread, time, ended.record)

    def _rate(self, lane: str) -> float:
        return self._mixed if all(self._queues.values()) else self._rates[lane]

    def _remaining(self, lane: str) -> float:
        """Return the seconds that the oldest request of a lane takes if nothing changes."""
        return max(0.0, self._queues[lane][0].left) / self._rate(lane)

    def _advance(self, time: float) -> None:
        passed, self._since = time - self._since, time
        for lane, queue in self._queues.items():
            if queue:
                queue[0].left -= passed * self._rate(lane)

    def _plan(self) -> None:
        remaining = [self._remaining(lane) for lane, queue in self._queues.items() if queue]
        self.due = self._since + min(remaining) if remaining else inf
