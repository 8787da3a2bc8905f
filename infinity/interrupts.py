"""Ctrl-C waits until states are consistent.

Python raises KeyboardInterrupt between any two bytecodes: between taking a buffer and noting who has it, or between
making an update and handing it over. Such sections run under `uninterrupted`, and the interrupt is raised at their end.
A second Ctrl-C does not wait: the engine then ends without settling what was under way.
"""

from __future__ import annotations

# The wrappers in `signal` convert every result to an enum, which takes ten times as long as the call itself.
import _signal  # type: ignore[import-not-found]
import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

_SIGINT: int = _signal.SIGINT
_P = ParamSpec("_P")
_R = TypeVar("_R")

_active = False
_main = threading.main_thread().ident


def _forked() -> None:
    global _main
    _main = threading.get_ident()


os.register_at_fork(after_in_child=_forked)


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C: it did not wait until states were consistent."""


class uninterrupted:
    """Defer SIGINT to the end of the block; also usable as a decorator. Costs about a microsecond.

    Only the main thread receives signals; elsewhere, and where SIGINT has no Python handler, this does nothing.
    """

    __slots__ = ("_handler", "_waiting")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._waiting = False

    def __enter__(self) -> None:
        global _active
        if _active or threading.get_ident() != _main:
            return
        handler = _signal.getsignal(_SIGINT)
        if not callable(handler):
            return
        # Recorded before the handler is replaced: an interrupt in between has nothing to undo.
        self._handler = handler
        _signal.signal(_SIGINT, self._put_off)
        _active = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        _active = False
        _signal.signal(_SIGINT, handler)
        if self._waiting:
            handler(_SIGINT, sys._getframe())

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _active:
                return function(*args, **kwargs)
            with uninterrupted():
                return function(*args, **kwargs)

        return guarded

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._waiting = False
            raise ForcedInterrupt("interrupted a second time, while states were on the move")
        self._waiting = True
