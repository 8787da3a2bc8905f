"""Ends an engine that was not closed, wherever the garbage collector finds it."""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import os
import threading
from collections.abc import Callable
from typing import Any

from infinity.comm.thread import is_collective

_MOMENT = 1.0
"""Seconds for which other threads hold one of the locks, at most."""

LOCKS: list[Any] = [
    lock
    for module, name in (
        (threading, "_shutdown_locks_lock"),  # until Python 3.12
        (threading, "_active_limbo_lock"),
        (concurrent.futures.thread, "_global_shutdown_lock"),
    )
    if (lock := getattr(module, name, None)) is not None
]
"""Locks that Python holds while it starts threads, and takes when they end."""


def end_collected(close: Callable[[], None], process: int) -> None:
    """Call `close`, but in a forked child, where the engine's threads do not exist and joining them would hang.

    The collector may call this in the middle of Python's own code that starts a thread, which holds a lock that the
    engine's threads need to end, or of a collective, for which a save waits. Another thread then closes, and this one
    does not wait.
    """
    if os.getpid() != process:
        return
    if not is_collective() and all(map(_can_be_taken, LOCKS)):
        close()
    else:
        _thread.start_new_thread(close, ())  # threading.Thread would take the locks


def _can_be_taken(lock: Any) -> bool:
    """Return False if this thread holds `lock`."""
    is_owned = getattr(lock, "_is_owned", None)  # an RLock's
    if is_owned is not None:
        return not is_owned()
    if not lock.acquire(timeout=_MOMENT):
        return False
    lock.release()
    return True
