"""Threads, locks, queues, futures and the clock of the engine's modules: Python's own, or those of a simulation.

A simulation (`infinity.sim`) runs the engine's code in virtual time. It replaces the primitives for the threads that it
starts; engines of other threads keep Python's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

Empty = queue.Empty


class Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class Condition(Protocol):
    """Call it with its lock held."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Queue(Protocol):
    """First in, first out. `get` raises `Empty` if it may not block and there is no item."""

    def put(self, item: Any) -> None: ...
    def get(self, block: bool = True) -> Any: ...


class Primitives(Protocol):
    """The primitives that engines of a thread use."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread: ...
    def lock(self) -> Lock: ...
    def condition(self, lock: Lock) -> Condition: ...
    def queue(self) -> Queue: ...
    def future(self) -> Future[Any]: ...
    def one_thread(self, name: str, initializer: Callable[[], None]) -> Executor: ...
    def now(self) -> float: ...


class Native:
    """Python's own threads, and the clock of the machine."""

    lock = staticmethod(threading.Lock)
    now = staticmethod(time.perf_counter)

    def queue(self) -> Queue:
        return queue.SimpleQueue()

    def future(self) -> Future[Any]:
        return Future()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def condition(self, lock: Any) -> Condition:
        return threading.Condition(lock)

    def one_thread(self, name: str, initializer: Callable[[], None]) -> Executor:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)
        try:
            # An executor that cannot start its thread later keeps the work forever.
            executor.submit(lambda: None).result()
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return executor


class _Present(threading.local):
    primitives: Primitives = Native()


_present = _Present()


@contextmanager
def using(primitives: Primitives) -> Iterator[None]:
    """Let the calling thread use `primitives` in the block."""
    before, _present.primitives = _present.primitives, primitives
    try:
        yield
    finally:
        _present.primitives = before


def present() -> Primitives:
    """Return the primitives that the calling thread uses."""
    return _present.primitives


def thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Return a daemon thread, not started."""
    return _present.primitives.thread(target, name)


def lock() -> Lock:
    return _present.primitives.lock()


def condition(lock: Lock) -> Condition:
    return _present.primitives.condition(lock)


def fifo() -> Queue:
    return _present.primitives.queue()


def future() -> Future[Any]:
    return _present.primitives.future()


def one_thread(name: str, initializer: Callable[[], None] = lambda: None) -> Executor:
    """Return an executor of one thread, which has started and called `initializer`.

    Raises RuntimeError if the thread cannot start or `initializer` fails.
    """
    return _present.primitives.one_thread(name, initializer)


def now() -> float:
    """Return seconds on the clock of `time.perf_counter`, or on the virtual one."""
    return _present.primitives.now()
