"""Ctrl-C waits until states are consistent.

Python raises KeyboardInterrupt between any two bytecodes: between taking a buffer and noting who has it, or between
making an update and handing it over. Such sections run under `uninterrupted`, and the interrupt is raised at their end.
A second Ctrl-C does not wait: the engine then ends without settling what was under way.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_active = False


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C: it did not wait until states were consistent."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put SIGINT off to the end of the block; also usable as a decorator. Costs a few microseconds.

    Only the main thread receives signals; elsewhere, and where SIGINT has no Python handler, this does nothing.
    """
    global _active
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    waiting = False

    def put_off(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            raise ForcedInterrupt("interrupted a second time, while states were on the move")
        waiting = True

    signal.signal(signal.SIGINT, put_off)
    _active = True
    try:
        yield
    finally:
        _active = False
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(signal.SIGINT, sys._getframe())
