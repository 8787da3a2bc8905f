"""The primitives of `infinity.concurrency` in virtual time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from infinity import concurrency
from infinity.sim.clock import Aborted, Clock, HostThread


class VirtualLock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held = False
        self._waiting: deque[HostThread] = deque()

    def acquire(self) -> bool:
        self._clock.turn()
        while self._held:
            self._waiting.append(self._clock.current)
            self._clock.block()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            self._clock.wake(self._waiting.popleft())

    def locked(self) -> bool:
        self._clock.turn()
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class VirtualCondition:
    def __init__(self, clock: Clock, lock: concurrency.Lock) -> None:
        self._clock = clock
        self._lock = lock
        self._waiting: list[HostThread] = []

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        while not predicate():
            self._waiting.append(self._clock.current)
            self._lock.release()
            self._clock.block()
            self._lock.acquire()
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._clock.wake(thread)


class VirtualQueue:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waiting: deque[HostThread] = deque()

    def put(self, item: Any) -> None:
        self._clock.turn()
        self._items.append(item)
        if self._waiting:
            self._clock.wake(self._waiting.popleft())

    def get(self, block: bool = True) -> Any:
        self._clock.turn()
        while not self._items:
            if not block:
                raise concurrency.Empty
            self._waiting.append(self._clock.current)
            self._clock.block()
        return self._items.popleft()


class VirtualFuture(Future[Any]):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[HostThread] = []

    def done(self) -> bool:
        self._clock.turn()
        return self._ended

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._waiting.append(self._clock.current)
            self._clock.block()
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._value

    def set_result(self, result: Any) -> None:
        self._value = result
        self._end()

    def set_exception(self, exception: BaseException | None) -> None:
        self._error = exception
        self._end()

    def _end(self) -> None:
        self._clock.turn()
        self._ended = True
        for thread in self._waiting:
            self._clock.wake(thread)


class VirtualThread(threading.Thread):
    def __init__(self, primitives: VirtualPrimitives, target: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._primitives, self._clock = primitives, primitives.clock
        self._work = target
        self._host = self._clock.add(name)
        self._joining: list[HostThread] = []
        self._has_ended = False

    def start(self) -> None:
        super().start()
        self._clock.wake(self._host)

    def join(self, timeout: float | None = None) -> None:
        self._clock.turn()
        if not self._has_ended:
            self._joining.append(self._clock.current)
            self._clock.block()

    def run(self) -> None:
        self._host.baton.acquire()
        try:
            with concurrency.using(self._primitives), self._primitives.around():
                self._work()
        except BaseException:
            if not self._clock.has_failed:
                self._end()
                raise
        else:
            if not self._clock.has_failed:
                self._end()

    def _end(self) -> None:
        self._has_ended = True
        for thread in self._joining:
            self._clock.wake(thread)
        self._clock.end()


class VirtualExecutor(Executor):
    """An executor of one thread."""

    def __init__(self, primitives: VirtualPrimitives, name: str, initializer: Callable[[], None]) -> None:
        self._primitives = primitives
        self._queue = primitives.queue()
        self._initializer = initializer
        self._thread = primitives.thread(self._run, name)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._primitives.future()
        self._queue.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        self._initializer()
        while (item := self._queue.get()) is not None:
            _carry_out(*item)
            del item  # the arguments, which an idle thread must not keep alive


class VirtualPrimitives:
    """Primitives of one clock. around: returns a context in which each thread runs."""

    def __init__(self, clock: Clock, around: Callable[[], AbstractContextManager[object]]) -> None:
        self.clock = clock
        self.around = around

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return VirtualThread(self, target, name)

    def lock(self) -> VirtualLock:
        return VirtualLock(self.clock)

    def condition(self, lock: concurrency.Lock) -> VirtualCondition:
        return VirtualCondition(self.clock, lock)

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self.clock)

    def future(self) -> VirtualFuture:
        return VirtualFuture(self.clock)

    def one_thread(self, name: str, initializer: Callable[[], None]) -> VirtualExecutor:
        return VirtualExecutor(self, name, initializer)

    def now(self) -> float:
        return self.clock.now


def _carry_out(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        result = work(*args, **kwargs)
    except Aborted:
        raise
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the future
        future.set_exception(error)
    else:
        del args
        future.set_result(result)
