"""A thread for collectives, which is given up if it waits for a lost rank and nothing ends the wait.

When a connection closes, gloo ends its waits, except that for a message in transit. A send of which a part is written,
or a receive of which a part is read, lasts until the timeout of the group, by default 30 minutes (torch 2.13;
`Pair::signalException` in gloo's transport/tcp/pair.cc). Nothing else ends such a wait or its thread. So the thread is
given up, and its callers get RanksError.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

from infinity.comm.agreement.comparison import failed_collective
from infinity.errors import RanksError

PATIENCE = 5.0
"""Seconds that each collective gets once a rank is lost. Most fail in milliseconds, when its connections close."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class CollectiveThread(Executor):
    """Executes collectives of `ranks` (global ranks) on one thread, first in, first out.

    initializer: called by the thread first. Raises its error, or RuntimeError if the thread cannot start.
    """

    def __init__(self, name: str, ranks: Iterable[int], initializer: Callable[[], None] = lambda: None) -> None:
        self.ranks = frozenset(ranks)
        self.error = ""
        """Why the thread was given up; empty if it was not."""
        self._access = threading.RLock()  # the garbage collector may end an engine in a thread that holds it
        self._unfinished: dict[Future[Any], None] = {}
        """In order of submission: the thread executes the first one."""
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = False
        self._long: Future[Any] | None = None
        """Collective in progress at the last call of `give_up`."""
        self._since = 0.0
        """Time of the first call that found it, by `time.monotonic`."""
        # A daemon: the end of Python would wait for a thread that was given up. See `_finish`.
        arguments = (self._queue, self._unfinished, self._access)
        self._thread = threading.Thread(target=_execute, args=arguments, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False
        with _access:
            _threads.add(self)
        try:
            self.submit(initializer).result()
        except BaseException:
            self.shutdown()
            raise

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Queue a collective. Raises RuntimeError after `shutdown`; after `give_up` the future holds RanksError."""
        future: Future[_R] = Future()
        item = future, lambda: fn(*args, **kwargs)
        with self._access:
            if self._closed:
                raise RuntimeError("the thread of collectives has ended")
            if not self.error:
                self._queue.put(item)  # first: the collector may close this object before the next line
                self._unfinished[future] = None
                return future
        future.set_exception(RanksError(self.error))
        return future

    def give_up(self, cause: str) -> None:
        """Fail all pending collectives with RanksError once the thread has stayed in one for `PATIENCE` seconds.

        Called repeatedly after the loss of a rank: the first call in each collective starts its time. cause: which rank
        was lost, and why.
        """
        with self._access:
            first, now = next(iter(self._unfinished), None), time.monotonic()
            # Each collective gets its own time: after a loss, several may fail one after the other.
            if first is None or first is not self._long:
                self._long, self._since = first, now
                return
            if now - self._since < PATIENCE:
                return
            self.error = failed_collective(RuntimeError("it did not end"), cause)
            failed = list(self._unfinished)
            self._unfinished.clear()
            self._long = None
            with suppress(Empty):  # with the memory that the work refers to
                while True:
                    self._queue.get_nowait()
        # Outside the lock: callbacks of a future run here, and may take locks of their own.
        for future in failed:
            future.set_exception(RanksError(self.error))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the collectives submitted so far.

        wait: block until then or until it is given up; not in the thread itself. cancel_futures: ignored.
        """
        with self._access:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        # The garbage collector may close the owner in any thread, also in this one, which cannot wait for itself.
        if wait and threading.current_thread() is not self._thread:
            self.finish()
            # A thread that was given up is still in its collective, for up to the timeout of the group.
            if not self.error:
                self._thread.join()

    def finish(self) -> None:
        """Wait for the collectives submitted so far, or until the thread is given up."""
        with self._access:
            last = next(reversed(self._unfinished), None)
        # `exception` waits, and does not raise it: the caller of the collective gets it.
        if last is not None:
            last.exception()


def _execute(queue: SimpleQueue[_Work | None], unfinished: dict[Future[Any], None], access: threading.RLock) -> None:
    """Body of the thread. It refers to its owner only in its work, so that an unclosed owner is collected."""
    _here.is_collective = True
    while (item := queue.get()) is not None:
        future, work = item
        del item
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised by the future
            failure = error
        del work  # with its arguments: an idle thread must not keep them alive
        with access:
            if future not in unfinished:  # given up meanwhile
                return
            del unfinished[future]
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
        del future, result, failure


class _Here(threading.local):
    is_collective = False


_here = _Here()
_threads: weakref.WeakSet[CollectiveThread] = weakref.WeakSet()
_access = threading.Lock()
"""Held for changes and copies of `_threads`."""


def is_collective() -> bool:
    """Return whether the calling thread is a CollectiveThread's. A wait for later work on it would be a deadlock."""
    return _here.is_collective


def threads_with(rank: int) -> list[weakref.ref[CollectiveThread]]:
    """Return the threads whose collectives contain `rank` of the whole job."""
    with _access:
        return [weakref.ref(each) for each in _threads if rank in each.ranks]


def _finish() -> None:
    """Wait at the end of Python for the collectives of open engines, in which other ranks may wait for this one."""
    with _access:
        every = list(_threads)
    for each in every:
        each.finish()


def _forked() -> None:
    """Forget the threads, which a forked child does not have."""
    # Another thread of the parent may have held the lock at the fork, and nothing would release it here.
    global _access
    _access = threading.Lock()
    _threads.clear()


# As concurrent.futures does: before daemon threads end and before the functions of `atexit`.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_forked)
