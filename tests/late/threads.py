"""Threads, locks, queues and futures in the virtual time of `late.clock`, with the interfaces of Python's own.

Each call lets the threads run first that are behind the calling one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from infinity import concurrency
from late.clock import HostThread, clock


class Lock:
    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[HostThread] = deque()

    def acquire(self) -> bool:
        clock().turn()
        while self._held:
            self._waiting.append(clock().current)
            clock().block()
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False
        if self._waiting:
            clock().wake(self._waiting.popleft())

    def locked(self) -> bool:
        clock().turn()
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Condition:
    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: list[HostThread] = []

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        assert timeout is None
        while not holds():
            self._waiting.append(clock().current)
            self._lock.release()
            clock().block()
            self._lock.acquire()
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            clock().wake(thread)


class Thread:
    def __init__(self, target: Callable[[], None], name: str, daemon: bool = True) -> None:
        self._target = target
        self._host = clock().add(name)
        self._host.is_ready = False
        self._waiting: list[HostThread] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        self._thread.start()
        clock().wake(self._host)

    def join(self) -> None:
        clock().turn()
        if not self._ended:
            self._waiting.append(clock().current)
            clock().block()

    def _run(self) -> None:
        self._host.baton.acquire()
        try:
            with concurrency.using(Primitives()):
                self._target()
        finally:
            self._ended = True
            for thread in self._waiting:
                clock().wake(thread)
            clock().end()


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[HostThread] = deque()

    def put(self, item: Any) -> None:
        clock().turn()
        self._items.append(item)
        if self._waiting:
            clock().wake(self._waiting.popleft())

    def get(self, block: bool = True) -> Any:
        clock().turn()
        while not self._items:
            if not block:
                raise queue.Empty
            self._waiting.append(clock().current)
            clock().block()
        return self._items.popleft()


class Future:
    def __init__(self) -> None:
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: list[HostThread] = []

    def done(self) -> bool:
        clock().turn()
        return self._ended

    def exception(self) -> BaseException | None:
        if not self.done():
            self._waiting.append(clock().current)
            clock().block()
        return self._error

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        clock().turn()
        self._ended = True
        for thread in self._waiting:
            clock().wake(thread)


class ThreadPoolExecutor:
    """An executor of one thread."""

    def __init__(
        self, max_workers: int, thread_name_prefix: str, initializer: Callable[[], None] = lambda: None
    ) -> None:
        assert max_workers == 1
        self._work = SimpleQueue()
        self._initializer = initializer
        self._thread = Thread(self._run, thread_name_prefix)
        self._thread.start()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()
        self._work.put((future, work, arguments))
        return future

    def shutdown(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._initializer()
        while (item := self._work.get()) is not None:
            _carry_out(*item)
            del item


def _carry_out(future: Future, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = work(*arguments)
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the future
        future.set_exception(error)
    else:
        del arguments
        future.set_result(result)


class Primitives:
    """The primitives of `infinity.concurrency` in virtual time."""

    lock, queue, future = Lock, SimpleQueue, Future

    def thread(self, target: Callable[[], None], name: str) -> Any:
        return Thread(target, name)

    def condition(self, lock: Any) -> Condition:
        return Condition(lock)

    def one_thread(self, name: str, initializer: Callable[[], None]) -> Any:
        return ThreadPoolExecutor(1, name, initializer)

    def now(self) -> float:
        return clock().now
