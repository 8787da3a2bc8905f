"""Virtual time: threads of which one runs at a time, the one whose clock is least.

At each call of a lock, queue, future or transfer, the running thread lets the threads behind it run. So threads meet in
the order of their clocks, a poll finds everything that has ended by then, and runs are deterministic.

Time passes by work of threads, and by resources that complete requests at times of their own (`Source`). Each record of
work names the record that determined its start, so that waits can be followed back to their cause.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Protocol


@dataclass(slots=True, eq=False)
class Record:
    """Work of a lane from `start` to `end`, in virtual seconds."""

    lane: str
    name: str
    nbytes: int
    thread: str
    """The thread that submitted it."""
    start: float
    end: float
    cause: Record | None = field(repr=False)
    """The work that had to end before this one began."""
    alone: float = 0.0
    """Seconds that it would have taken without sharing the processors."""
    lost: dict[str, float] | None = None
    """Lane → seconds by which sharing the processors with it delayed the end."""


class Source(Protocol):
    """A resource that completes requests."""

    due: float
    """Time of its next completion; inf: none is under way. A source passes each new one to `Clock.expect`."""

    def complete(self) -> None:
        """Complete the request that is due, and wake the threads that wait for it."""


class HostThread:
    """A thread and its clock. The thread runs while it holds `baton`."""

    def __init__(self, name: str, index: int, time: float) -> None:
        self.name, self.index, self.time = name, index, time
        self.is_ready = True
        self.last: Record | None = None
        """The work that determined this clock."""
        self.debt = 0.0
        """Seconds of work that are added to the clock at the thread's next call."""
        self.label = self.lane = ""
        """Name of work and lane of copies that name none."""
        self.baton = threading.Lock()
        self.baton.acquire()


class Aborted(BaseException):
    """Ends a thread of a simulation that has failed."""


class Clock:
    """Threads in virtual time. The thread that makes it is the model's."""

    def __init__(self) -> None:
        self.threads = [HostThread("model", 0, 0.0)]
        self.current = self.threads[0]
        self.records: list[Record] = []
        self.submitted: list[Record] = []
        """Records of transfers in the order of their submission."""
        self.sources: list[Source] = []
        self._horizon = 0.0
        """No other thread is ready, and no request completes, before this time."""
        self.processors = Processors(self)
        self._failure = ""

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The running thread's clock."""
        if self.current.debt:
            self._pay(self.current)
        return self.current.time

    def turn(self) -> None:
        """Let threads run, and requests complete, that are behind this thread."""
        me = self.current
        if me.debt:
            self._pay(me)
        if me.time >= self._horizon:
            self._yield(me)

    def work(self, lane: str, seconds: float, name: str = "", nbytes: int = 0) -> Record:
        """Let the running thread work on the host's processors. Returns the record, which has ended."""
        me = self.current
        self.turn()
        return self._work(me, lane, seconds, name or me.label, nbytes)

    def sleep(self, lane: str, seconds: float, name: str = "", nbytes: int = 0) -> Record:
        """Let the running thread wait for work of a lane that needs no processor. Returns its record."""
        self.turn()
        me = self.current
        record = Record(lane, name or me.label, nbytes, me.name, me.time, me.time + seconds, me.last, seconds)
        self.records.append(record)
        self.wait_until(record.end, record)
        return record

    def wait_until(self, time: float, cause: Record | None) -> None:
        """Let the running thread wait for work that ends at `time`."""
        me = self.current
        if me.debt:
            self._pay(me)
        if time > me.time:
            me.time, me.last = time, cause
        self._yield(me)

    def block(self) -> None:
        """Wait until `wake` is called for this thread."""
        me = self.current
        me.is_ready = False
        self._pass_on(me)

    def wake(self, thread: HostThread, time: float | None = None, cause: Record | None = None) -> None:
        """Let a blocked thread continue at `time`, because of `cause`; by default now, because of this thread."""
        if time is None:
            time, cause = self.now, self.current.last
        if time > thread.time:
            thread.time, thread.last = time, cause
        thread.is_ready = True
        self.expect(thread.time)

    def expect(self, time: float) -> None:
        """Let the running thread pass `time` only after the events of that time."""
        if time < self._horizon:
            self._horizon = time

    def _pay(self, me: HostThread) -> None:
        seconds, me.debt = me.debt, 0.0
        self._yield(me)
        self._work(me, lane_of(me.name), seconds, "", 0)

    def _work(self, me: HostThread, lane: str, seconds: float, name: str, nbytes: int) -> Record:
        record = Record(lane, name, nbytes, me.name, me.time, me.time, me.last, seconds)
        self.records.append(record)
        self.processors.add(me, record)
        self.block()
        return record

    # -- threads -----------------------------------------------------------------------------------------------------

    def add(self, name: str) -> HostThread:
        """Add a thread, which is blocked."""
        thread = HostThread(name, len(self.threads), self.now)
        thread.is_ready = False
        self.threads.append(thread)
        return thread

    def end(self) -> None:
        """End the running thread, which calls nothing of this clock afterwards."""
        me = self.current
        if me.debt:
            self._pay(me)
        me.is_ready = False
        self.threads.remove(me)
        self._next().baton.release()

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    def abort(self) -> None:
        """End all threads, after an error in the model's."""
        self._failure = self._failure or "The simulation has failed."
        for thread in self.threads[1:]:
            thread.baton.release()

    @contextmanager
    def naming(self, name: str, lane: str = "") -> Iterator[None]:
        """Name the work of the running thread in the block. lane: that of its copies; default: by their direction."""
        me = self.current
        before, (me.label, me.lane) = (me.label, me.lane), (name, lane)
        try:
            yield
        finally:
            me.label, me.lane = before

    def _yield(self, me: HostThread) -> None:
        time = me.time
        if time < self._horizon:
            return None  # the common case: nothing else is due
        for source in self.sources:
            if source.due <= time:
                return self._pass_on(me)
        for thread in self.threads:
            if thread.is_ready and (thread.time < time or (thread.time == time and not me.index and thread.index)):
                return self._pass_on(me)
        return None

    def _pass_on(self, me: HostThread) -> None:
        if self._failure:
            raise Aborted(self._failure)
        to = self._next()
        if to is not me:
            to.baton.release()
            me.baton.acquire()
        if self._failure:
            raise Aborted(self._failure) if me.index else RuntimeError(self._failure)

    def _next(self) -> HostThread:
        """Complete requests until the next event is a thread's. Returns that thread, which is the running one now."""
        while True:
            first: HostThread | None = None
            others = inf
            for thread in self.threads:
                if not thread.is_ready:
                    continue
                # A thread goes before the model's at the same time: it has done work that takes no time already.
                if first is None or thread.time < first.time or (not first.index and thread.time == first.time):
                    first, others = thread, inf if first is None else first.time
                elif thread.time < others:
                    others = thread.time
            source = min(self.sources, key=_due)
            if source.due <= (inf if first is None else first.time) and source.due < inf:
                source.complete()
                continue
            self._horizon = others if others < source.due else source.due
            if first is None:
                names = ", ".join(thread.name for thread in self.threads)
                self._failure = f"internal error: every thread of the simulation waits for another one: {names}"
                first = self.threads[0]
            self.current = first
            return first


def _due(source: Source) -> float:
    return source.due


LANE_OF_THREAD = {
    "model": "compute",
    "infinity-update": "update",
    "infinity-comm": "gather",
    # Where the host computes, only saved activations pass through staging buffers.
    "infinity-staging-reads": "activations",
    "infinity-staging-writes": "activations",
}


def lane_of(thread: str) -> str:
    """Return the lane of work that a thread of the engine does without naming one."""
    return LANE_OF_THREAD.get(thread, "reduce")


class Processors:
    """The host's processors and the bandwidth of its memory: threads that work at once share them in equal parts."""

    def __init__(self, clock: Clock) -> None:
        self.due = inf
        self._clock = clock
        self._since = 0.0
        self._working: list[tuple[HostThread, Record]] = []
        self._left: list[float] = []
        """Seconds of each thread in `_working` that are left, if it were alone."""
        clock.sources.append(self)

    def add(self, thread: HostThread, record: Record) -> None:
        """Let `thread` work for `record.alone` seconds from its clock on. It must block."""
        self._advance(thread.time)
        self._working.append((thread, record))
        self._left.append(record.alone)
        self._plan()

    def complete(self) -> None:
        time = self.due
        self._advance(time)
        number = min(range(len(self._left)), key=self._left.__getitem__)
        thread, record = self._working.pop(number)
        del self._left[number]
        record.end = time
        self._plan()
        self._clock.wake(thread, time, record)
        thread.last = record

    def _advance(self, time: float) -> None:
        share = len(self._working)
        passed, self._since = time - self._since, time
        if not share or passed <= 0:
            return
        part = passed / share
        self._left = [left - part for left in self._left]
        if share > 1:
            for _, record in self._working:
                lost = record.lost = record.lost or {}
                for _, other in self._working:
                    if other is not record:
                        lost[other.lane] = lost.get(other.lane, 0.0) + part

    def _plan(self) -> None:
        self.due = self._since + max(0.0, min(self._left)) * len(self._left) if self._left else inf
        self._clock.expect(self.due)
