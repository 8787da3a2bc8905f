"""Transfers: one asynchronous copy between tiers, which carries its own error and can be waited on from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol


class Transfer(Protocol):
    """One asynchronous copy. `wait` returns when the bytes are where they should be, or raises what went wrong."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Done:
    """A transfer that needed no time."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


DONE = Done()


class Failed:
    """A transfer that could not even start."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True


class Promised:
    """A transfer that a background thread carries out in steps."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()


class Promise:
    """A transfer that its owner completes once, by `keep` or `fail`. Ten times cheaper than a Future."""

    __slots__ = ("_done", "_error", "_lock")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()  # free once it is done
        self._lock.acquire()

    def wait(self) -> None:
        if not self._done:
            with self._lock:
                pass
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # breaks the cycle error -> frame -> self, which would keep alive what other frames refer to

    def done(self) -> bool:
        return self._done

    def keep(self) -> None:
        self._done = True
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.keep()


def run_on(executor: Executor, work: Callable[..., Any], *arguments: Any) -> Promised:
    """Run `work(*arguments)` on the executor's threads; the references to the arguments end before the transfer is
    done.

    An executor keeps them a moment longer, in which a buffer that is given back would seem to be in use.
    """
    kept = list(arguments)

    def run() -> Any:
        handed = tuple(kept)
        kept.clear()
        return work(*handed)

    return Promised(executor.submit(run))
