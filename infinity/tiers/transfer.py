"""Transfers: one asynchronous copy between tiers, which carries its own error and can be waited on from any thread."""

from __future__ import annotations

from concurrent.futures import Future
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

