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

    def __init__(self, wakeup: float = 0.0, processors: int = 1, dram: float = inf) -> None:
        """wakeup: seconds from an event until a thread that slept for it continues. processors, dram: see
        `Processors`.
        """
        self.wakeup = wakeup
        self.threads = [HostThread("model", 0, 0.0)]
        self.current = self.threads[0]
        self.records: list[Record] = []
        self.submitted: list[Record] = []
        """Records of transfers in the order of their submission."""
        self.sources: list[Source] = []
        self._horizon = 0.0
        """No other thread is ready, and no request completes, before this time."""
        self.processors = Processors(self, processors, dram)
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

    def work(self, lane: str, seconds: float, name: str = "", nbytes: int = 0, pool: str = "") -> Record:
        """Let the running thread work on the host's processors. pool: that of the job, `FOREGROUND` or `BACKGROUND`.
        Returns the record, which has ended.
        """
        me = self.current
        self.turn()
        return self._work(me, lane, seconds, name or me.label, nbytes, pool)

    def spend(self, seconds: float) -> None:
        """Let the running thread work alone on a processor of its own: Python, and launches of kernels."""
        if self.current.debt:
            self._pay(self.current)
        self.current.time += seconds

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
            me.time, me.last = time + self.wakeup, cause
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
            thread.time, thread.last = time + self.wakeup, cause
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

    def _work(self, me: HostThread, lane: str, seconds: float, name: str, nbytes: int, pool: str = "") -> Record:
        record = Record(lane, name, nbytes, me.name, me.time, me.time, me.last, seconds)
        self.records.append(record)
        self.processors.add(me, record, pool)
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
    "infinity-decoding": "gather",
    # Where the host computes, only saved activations pass through staging buffers.
    "infinity-staging-reads": "activations",
    "infinity-staging-writes": "activations",
}


def lane_of(thread: str) -> str:
    """Return the lane of work that a thread of the engine does without naming one."""
    return LANE_OF_THREAD.get(thread, "reduce")


FOREGROUND, BACKGROUND = "foreground", "background"
"""Pools of threads of the native kernels, by the priority of their jobs (csrc/adam/thread_pool.cpp)."""


@dataclass(slots=True, eq=False)
class _Job:
    """Work of a thread. Rates and seconds are those of all processors alone, which are 1."""

    thread: HostThread
    record: Record
    pool: str
    left: float
    workers: int = 0
    """Threads of the pool that have joined it. They stay until it ends."""
    most: float = 1.0
    """The rate of its threads, if they were alone."""
    rate: float = 0.0


class Processors:
    """The host's processors and the bandwidth of its memory: threads that work at once share them in equal parts.

    A job of the native kernels has at most the rate of its threads: the calling one, and the workers of its pool that
    are idle, or become so before those of later jobs. Copies to and from devices take their part of the memory's
    bandwidth first, or an equal part if that is less.
    """

    def __init__(self, clock: Clock, count: int, dram: float) -> None:
        """count: of processors. dram: bandwidth of memory ÷ that of all processors; inf: copies take none of it."""
        self.due = inf
        self._clock = clock
        self._since = 0.0
        self._count, self._dram = count, dram
        self._jobs: list[_Job] = []
        """In the order of their arrival."""
        self._idle = {FOREGROUND: count - 1, BACKGROUND: count}
        self._copies: list[tuple[Record, float]] = []
        """Copies that have not ended, and their rates."""
        self._ending: _Job | None = None
        """The job that ends at `due`; None: a copy begins or ends then."""
        clock.sources.append(self)

    def add(self, thread: HostThread, record: Record, pool: str = "") -> None:
        """Let `thread` work for `record.alone` seconds from its clock on. It must block."""
        self._advance(thread.time)
        self._jobs.append(_Job(thread, record, pool, record.alone))
        self._plan()

    def copy_seconds(self, seconds: float, rate: float, start: float) -> float:
        """Return the seconds of a copy that begins at `start` and takes `seconds` at `rate`, beside present work."""
        if self._dram == inf or not seconds:
            return seconds
        left = self._dram - self._copied(start)
        return seconds * rate / min(rate, max(left / 2, left - 1.0) if self._jobs else left)

    def add_copy(self, record: Record, work: float) -> None:
        """Let a copy take its part of the memory's bandwidth. work: seconds in which all processors move its bytes."""
        if self._dram < inf and record.end > record.start:
            self._advance(self._clock.now)
            self._copies.append((record, work / (record.end - record.start)))
            self._plan()

    def complete(self) -> None:
        time, ended = self.due, self._ending
        self._advance(time)
        if ended is not None:
            self._jobs.remove(ended)
            if ended.pool:
                self._idle[ended.pool] += ended.workers
            ended.record.end = ended.thread.time = time
            ended.thread.last = ended.record
            ended.thread.is_ready = True
        self._plan()
        self._clock.expect(time)

    def _copied(self, time: float) -> float:
        """Return the rate of all copies at a time."""
        return sum(rate for record, rate in self._copies if record.start <= time < record.end)

    def _advance(self, time: float) -> None:
        passed, self._since = time - self._since, time
        if not self._jobs or passed <= 0:
            return
        rates: dict[str, float] = {}
        for record, rate in self._copies:
            if record.start < time and record.end > time - passed:
                rates[record.lane] = rates.get(record.lane, 0.0) + rate
        for job in self._jobs:
            job.left -= passed * job.rate
            rates[job.record.lane] = rates.get(job.record.lane, 0.0) + job.rate
        for job in self._jobs:
            own, total = job.record.lane, sum(rates.values()) - job.rate
            if total > 0.0 and job.rate < 1.0:
                lost = job.record.lost = job.record.lost or {}
                for lane, rate in rates.items():
                    others = rate - job.rate if lane == own else rate
                    if others > 0.0:
                        lost[lane] = lost.get(lane, 0.0) + passed * (1.0 - job.rate) * others / total

    def _plan(self) -> None:
        """Let idle workers join the oldest jobs, share the bandwidth, and find the next event."""
        self._copies = [copy for copy in self._copies if copy[0].end > self._since]
        for job in self._jobs:
            if job.pool and self._count > 1:
                places = self._count - (job.pool == FOREGROUND) - job.workers
                joining = min(places, self._idle[job.pool])
                job.workers += joining
                self._idle[job.pool] -= joining
                job.most = max(1, job.workers + (job.pool == FOREGROUND)) / self._count
        left, sharing = min(1.0, max(self._dram - self._copied(self._since), 1e-3)), len(self._jobs)
        for job in sorted(self._jobs, key=lambda job: job.most):
            job.rate = min(job.most, left / sharing)
            left, sharing = left - job.rate, sharing - 1
        self._ending = min(self._jobs, key=_seconds_left, default=None)
        self.due = inf if self._ending is None else self._since + max(0.0, _seconds_left(self._ending))
        for record, _ in self._copies if self._jobs else ():
            for time in (record.start, record.end):
                if self._since < time < self.due:
                    self.due, self._ending = time, None
        self._clock.expect(self.due)


def _seconds_left(job: _Job) -> float:
    return job.left / job.rate
