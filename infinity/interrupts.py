"""Defers Ctrl-C until states are consistent, and handles SIGTERM.

Python raises KeyboardInterrupt between any two bytecodes, such as between leasing a buffer and recording its owner, or
between creating an update and queueing it. Such sections run under `uninterrupted`, which raises the interrupt at their
end. A second Ctrl-C is raised at once; the engine then stops without finishing pending work.
"""

from __future__ import annotations

# The wrappers in `signal` convert every result to an enum, which takes ten times as long as the call.
import _signal  # type: ignore[import-not-found]
import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

_SIGINT: int = _signal.SIGINT
_SIGTERM: int = _signal.SIGTERM
_P = ParamSpec("_P")
_R = TypeVar("_R")

_active = False
_ending = False
"""True: SIGTERM arrived in an `uninterrupted` block, after which the process ends."""
_main = threading.main_thread().ident
_actions: list[tuple[Callable[[], None]]] = []
"""Actions of SIGTERM, each of one caller of `on_sigterm`."""


def _forked() -> None:
    global _main
    _main = threading.get_ident()
    _actions.clear()  # the parent's


os.register_at_fork(after_in_child=_forked)


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C, raised before states are consistent."""


class uninterrupted:
    """Defer SIGINT to the end of the block; also a decorator. Costs about a microsecond.

    No-op in other threads than the main one, which receives the signals, and if SIGINT has no Python handler.
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
        # Set before the handler is replaced, so that an interrupt in between leaves nothing to undo.
        self._handler = handler
        _signal.signal(_SIGINT, self._defer)
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
        if _ending:
            _end()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _active:
                return function(*args, **kwargs)
            with uninterrupted():
                return function(*args, **kwargs)

        return guarded

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._waiting = False
            raise ForcedInterrupt("interrupted a second time, while states were being transferred")
        self._waiting = True


def on_sigterm(action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` in the main thread when this process receives SIGTERM. Returns a function that ends this.

    A handler of the user's own stays, and other threads cannot set one. A forked child ends as it does by default.
    """
    present = _signal.getsignal(_SIGTERM)
    if threading.get_ident() != _main or present not in (_signal.SIG_DFL, _handle_sigterm):
        return lambda: None
    if present is not _handle_sigterm:
        _actions.clear()
        _signal.signal(_SIGTERM, _handle_sigterm)
    entry = (action,)
    _actions.append(entry)

    def restore() -> None:
        _actions[:] = [each for each in _actions if each is not entry]
        if not _actions and threading.get_ident() == _main and _signal.getsignal(_SIGTERM) is _handle_sigterm:
            _signal.signal(_SIGTERM, _signal.SIG_DFL)

    return restore


def exit_on_sigterm() -> Callable[[], None]:
    """Let SIGTERM end the process by SystemExit, as an error would, so that engines are closed. Returns a function that
    ends this. An `uninterrupted` block is finished before. Another action of `on_sigterm` takes its place.
    """
    return on_sigterm(_end)


def _handle_sigterm(number: int, frame: FrameType | None) -> None:
    if not _actions:  # in a forked child, such as a worker of a pool, which nothing else ends
        _signal.signal(_SIGTERM, _signal.SIG_DFL)
        _signal.raise_signal(_SIGTERM)
    others = [action for (action,) in _actions if action is not _end]
    for action in others or [_end]:
        action()


def _end() -> None:
    global _ending
    _ending = _active
    if not _active:
        raise SystemExit(128 + _SIGTERM)
