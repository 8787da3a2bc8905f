"""Finds ranks that ended or hang. See [Note: ranks that end or hang].

Every rank has one connection to the first rank of its group, and the first rank one to each other. A thread in native
code sends a heartbeat over them every second, without the GIL. Another thread receives: it reports ranks that are
silent or whose connection closes. The first rank relays each report to all.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from multiprocessing.util import Finalize

import torch.distributed as dist

from infinity.comm.connections import disconnect
from infinity.comm.dtensor import TensorParallelMesh
from infinity.comm.groups import connecting, destroy_group
from infinity.comm.liveness.meeting import Link, meet
from infinity.comm.liveness.processes import Process, StuckMain, oom_kills
from infinity.comm.thread import CollectiveThread, threads_with
from infinity.errors import RanksError
from infinity.native import _heartbeat
from infinity.observe.log import logger

RANK_TIMEOUT = 30.0
"""Seconds of silence after which a rank counts as hanging, by default."""
_PERIOD = 1.0
"""Seconds between two heartbeats, at most."""
_PATIENCE = 2.0
"""Seconds by which the report on a rank may arrive after the error of a collective with that rank."""
_LONGEST_TEXT = 2000
_JOIN = 5.0


class Report(Enum):
    """Ways in which a rank leaves."""

    LOST = "lost"
    """It ended without a report, or is silent."""
    FAILED = "failed"
    """It closed its engine, or ended, because of an exception."""
    CLOSED = "closed"
    """It closed its engine."""
    FOLLOWED = "followed"
    """It closed its engine because another rank had left, whose report is the text."""


class Heartbeat:
    """Heartbeats between the `size` ranks of `group`, a gloo group. Constructed on all ranks at once.

    timeout: seconds of silence after which a rank is lost; 0: a silent rank is never lost. on_lost: called with a rank
    of the whole job that is lost, by a thread of this object, which holds no reference to its owner.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, timeout: float, on_lost: Callable[[int], None]
    ) -> None:
        processes, links = meet(group, rank, size)
        self._watch = _Watch(processes, rank, links, timeout, on_lost)
        self._watch.start()
        # Unlike weakref.finalize, it also runs at the end of a process that multiprocessing started, and in no fork.
        self._finalizer = Finalize(self, _leave_unclosed, (self._watch,), exitpriority=0)

    def cause(self) -> str:
        """Return which ranks left and why; empty if none did.

        Waits for a report that may be in transit, so call it after a collective has failed.
        """
        # gloo notices a closed connection at once; the report with the reason may still be on its way.
        self._watch.is_reported.wait(_PATIENCE)
        return self._watch.cause()

    def relay(self, other: Heartbeat) -> None:
        """Pass on what `other`, of the same engine, knows when this rank leaves because of it, and the reverse."""
        self._watch.beside.append(other._watch)
        other._watch.beside.append(self._watch)

    def leave(self, error: BaseException | None) -> None:
        """Report to the other ranks that this rank leaves on purpose, or because of `error`."""
        self._watch.leave(error)

    def close(self) -> None:
        """End the threads and the connections. Without `leave`, the other ranks report this one as lost."""
        # Once: the finalizer runs at the end of the process, too.
        if self._finalizer.still_active():
            self._finalizer.cancel()
            self._watch.close()


class _Watch:
    """The threads of a heartbeat, and their state. Holds no reference to the heartbeat, which ends them."""

    def __init__(
        self,
        processes: Sequence[Process],
        rank: int,
        links: Mapping[int, Link],
        timeout: float,
        on_lost: Callable[[int], None],
    ) -> None:
        self._processes = processes
        self._rank = rank
        self._links = links
        self._timeout = timeout
        self._on_lost = on_lost
        # Several heartbeats fit into a short timeout, so that one that is late is no loss.
        self._period = min(_PERIOD, timeout / 4) if timeout else _PERIOD
        self._silence = dict.fromkeys(links, 0.0)
        # Counted at start: only kills since then can explain a rank that ends.
        self._oom_kills = oom_kills()
        self._main = StuckMain(self._follow)
        self._lost = ""
        """Text of the first report on a lost rank."""
        self._waiting: list[weakref.ref[CollectiveThread]] = []
        """Threads that may wait for a lost rank."""
        self._reports: dict[int, tuple[Report, str]] = {}
        self.is_reported = threading.Event()
        """Set once a rank is lost or failed."""
        # A pipe wakes both threads, the native one as well, which waits in poll and not in Python.
        self._stopped, self._stop = os.pipe()
        beats = ([link.fileno() for link in links.values()], self._period, self._stopped)
        self._threads = [
            threading.Thread(target=_heartbeat.beat, args=beats, name="infinity-beat", daemon=True),
            threading.Thread(target=self._receive_all, name="infinity-ranks", daemon=True),
        ]
        self.beside: list[_Watch] = []
        """Watches of the same engine, on other ranks."""
        _watches.add(self)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cause(self) -> str:
        """Return which ranks left, and why: those that failed or are lost, else those that others followed, else those
        that closed their engines.
        """
        return self._texts(Report.LOST, Report.FAILED) or self._texts(Report.FOLLOWED) or self._texts(Report.CLOSED)

    def _texts(self, *kinds: Report) -> str:
        # A copy, since the receiving thread adds reports. Several ranks may have followed one: its text is shown once.
        found = dict(self._reports)
        return "; ".join(dict.fromkeys(text for report, text in found.values() if report in kinds and text))

    def leave(self, error: BaseException | None) -> None:
        name = self._processes[self._rank].name
        # sys.exit() and sys.exit(0) are no failures.
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        watches = (self, *self.beside)
        cause = next(filter(None, (each._texts(Report.LOST, Report.FAILED, Report.FOLLOWED) for each in watches)), "")
        # The cause is another rank: its text is passed on, so that all ranks show the first failure and not this one.
        if isinstance(error, RanksError) or (failed and cause):
            self._send(self._rank, Report.FOLLOWED, cause[:_LONGEST_TEXT])
        elif failed:
            text = f"{name} failed: {type(error).__name__}: {str(error) or 'without a message'}"
            self._send(self._rank, Report.FAILED, text[:_LONGEST_TEXT])
        else:
            self._send(self._rank, Report.CLOSED, f"{name} closed its engine, or ended")

    def _follow(self, cause: str) -> None:
        """Report to all ranks of this engine that this one ends because of `cause`."""
        for each in (self, *self.beside):
            each._send(each._rank, Report.FOLLOWED, cause[:_LONGEST_TEXT])

    def close(self) -> None:
        os.write(self._stop, b"1")  # a forked child may keep the pipe open, so its end would not be seen
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection may end it in any thread
                thread.join(_JOIN)
        for link in self._links.values():
            link.finish()
            link.close()
        os.close(self._stop)
        os.close(self._stopped)

    def abandon(self) -> None:
        """Close this process's copies of the connections."""
        for link in self._links.values():
            link.close()

    # -- the receiving thread ----------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        """Receive until `close`.

        Silence is counted in this thread's own turns, of which each counts at most two periods: after this rank was
        stopped itself, the others' heartbeats have yet to be read.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            turn = time.monotonic()
            while True:
                for key, _ in selector.select(max(0.0, turn + self._period - time.monotonic())):
                    if key.data is None:
                        return
                    # A connection that has ended is always readable: the loop would spin.
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - turn >= self._period:
                    self._count_silence(min(now - turn, 2 * self._period))
                    turn = now
                    if self._lost:
                        for each in self._waiting:
                            if (thread := each()) is not None:
                                thread.give_up(self._lost)
                        self._main.check(self._lost)

    def _receive(self, rank: int) -> bool:
        """Receive from `rank`. Return whether more can arrive."""
        try:
            lines = self._links[rank].receive()
        except BlockingIOError:
            return True
        except ConnectionResetError:
            lines = None
        except OSError:  # its machine or network failed: it is reported as silent
            return False
        # The connection has ended. A rank that left on purpose has sent its report before.
        if lines is None:
            if rank not in self._reports:
                process = self._processes[rank]
                self._report(rank, Report.LOST, f"{process.name} is lost: {process.how_it_ended(self._oom_kills)}")
            self._silence.pop(rank, None)
            return False
        if rank in self._silence:
            self._silence[rank] = 0.0
        for line in filter(None, lines):
            about, report, text = json.loads(line)
            self._report(about, Report(report), text)
        return True

    def _count_silence(self, seconds: float) -> None:
        for rank in list(self._silence):
            self._silence[rank] += seconds
            if self._timeout and self._silence[rank] >= self._timeout:
                del self._silence[rank]
                process = self._processes[rank]
                text = f"{process.name} has not responded for {self._timeout:g} s (infinity.rank_timeout)"
                self._report(rank, Report.LOST, f"{text}: {process.why_silent()}")

    def _report(self, rank: int, report: Report, text: str) -> None:
        """Record how `rank` left, once, and send it to the ranks that have no connection to it."""
        # The first report has the reason; later ones, such as a closed connection, follow from it.
        if rank in self._reports:
            return
        known = {said for each in (self, *self.beside) for _, said in dict(each._reports).values()}
        self._reports[rank] = report, text
        # The center of the star; the others have a connection to it alone.
        if self._rank == 0:
            self._send(rank, report, text)
        if report is not Report.CLOSED and text not in {*known, ""}:
            logger.error("%s", text)  # where the model's own collective fails, its error does not name the cause
        if report in (Report.LOST, Report.FAILED):
            self.is_reported.set()
        if report is Report.LOST:
            self._lost = self._lost or text
            # The threads are noted first: `on_lost` closes connections, which ends their collectives.
            lost = self._processes[rank].rank
            self._waiting += threads_with(lost)
            self._on_lost(lost)

    def _send(self, about: int, report: Report, text: str) -> None:
        line = json.dumps([about, report.value, text]).encode() + b"\n"
        for link in self._links.values():
            link.send(line)


_watches: weakref.WeakSet[_Watch] = weakref.WeakSet()


def _forked() -> None:
    """Close the connections in a forked child: otherwise a child that outlives its parent would keep
    them open, and the end of the parent would not be seen.
    """
    for watch in list(_watches):
        watch.abandon()


os.register_at_fork(after_in_child=_forked)


def _leave_unclosed(watch: _Watch) -> None:
    """Leave when the process exits, or when the engine is garbage-collected."""
    watch.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
    watch.close()


class Heartbeats:
    """Heartbeats of the `size` data-parallel ranks of `group`, a gloo group, and after `connect` of a replica's ranks.

    Constructed on all data-parallel ranks at once. timeout: seconds of silence after which a rank is lost; 0: never.
    A rank that leaves because of another one sends the cause to both groups, so that it reaches ranks that have neither
    in common with the first.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._replica: dist.ProcessGroup | None = None
        self._each = [self._between(group, rank, size)]

    def _between(self, group: dist.ProcessGroup, rank: int, size: int) -> Heartbeat:
        # A rank whose construction fails leaves at once, while others are still connecting to it.
        with connecting():
            dist.barrier(group)
            return Heartbeat(group, rank, size, self._timeout, disconnect)

    def connect(self, mesh: TensorParallelMesh) -> None:
        """Start the heartbeat of a replica. All its ranks call it, once."""
        self._replica = mesh.duplicate_group()
        assert self._replica is not None
        self._each.append(self._between(self._replica, mesh.number, mesh.size))
        # A rank that leaves because of one star passes the cause on in the other.
        self._each[0].relay(self._each[1])

    def cause(self) -> str:
        """Return which ranks left and why; empty if none did.

        Waits for a report that may be in transit, so call it after a collective has failed.
        """
        return next(filter(None, (each.cause() for each in self._each)), "")

    def leave(self, error: BaseException | None) -> None:
        """Report to the other ranks that this rank leaves on purpose, or because of `error`."""
        for each in self._each:
            each.leave(error)

    def close(self) -> None:
        """End the threads and the connections. Without `leave`, the other ranks report this one as lost."""
        for each in self._each:
            each.close()
        if self._replica is not None:
            destroy_group(self._replica)
            self._replica = None
