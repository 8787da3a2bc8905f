"""Windows that are read before the update asks for them, into buffers that are free at the time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from infinity import concurrency
from infinity.plan.placement import Extent
from infinity.tiers.base import Window
from infinity.tiers.pool import Pool

Open = Callable[[Extent, int, int, Pool], Window | None]
"""Opens a window: (extent, offset, bytes, pool); None if the pool has no free buffer."""


class WindowsAhead:
    """Windows of one tier, opened ahead. Thread-safe.

    A write drops the windows that it overlaps, and a window that needs a buffer takes that of one opened ahead. So none
    has old bytes, and none has to be taken.
    """

    def __init__(self, open_window: Open) -> None:
        self._open = open_window
        self._access = concurrency.lock()
        self._windows: dict[int, tuple[Window, Pool]] = {}
        """First byte in the tier → window and pool of its buffer, in the order of opening."""
        self._dropped: deque[tuple[Window, Pool]] = deque()
        """Windows that nobody will take, whose read may not have ended."""

    def open(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> bool:
        """Open a window unless it is open. Returns False if no buffer is free. Does not wait."""
        with self._access:
            if extent.offset + offset in self._windows:
                return True
            window = self._open(extent, offset, nbytes, pool)
            if window is None:
                return False
            self._windows[extent.offset + offset] = window, pool
            return True

    def take(self, extent: Extent, offset: int, nbytes: int) -> Window | None:
        """Return a window on these bytes, which the caller releases; None if none was opened ahead."""
        # Without the lock, since this runs for each tile. A window that is opened meanwhile is only not taken.
        if not self._windows:
            return None
        with self._access:
            window, pool = self._windows.pop(extent.offset + offset, (None, None))
            if window is None or pool is None or window.tensor.numel() == nbytes:
                return window
            # Tiles of another size: the bytes are right, but the caller's buffers have the size it asked for.
            self._dropped.append((window, pool))
            return None

    def forget(self, extent: Extent, offset: int, nbytes: int) -> None:
        """Drop the windows on bytes that are about to be written."""
        if not self._windows:
            return
        start = extent.offset + offset
        with self._access:
            for first, (window, pool) in list(self._windows.items()):
                if first < start + nbytes and start < first + window.tensor.numel():
                    del self._windows[first]
                    # Its read may be under way: the buffer is released later, by a thread that may wait.
                    self._dropped.append((window, pool))

    def give_up(self, pool: Pool) -> bool:
        """Release a buffer of `pool`: of a dropped window, or of the window opened last. Waits for its read.

        Returns False if no window has one.
        """
        with self._access:
            window = self._next_of(pool)
        if window is None:
            return False
        # Outside the lock, which a write must be able to take while this read ends.
        _abandon(window)
        return True

    def _next_of(self, pool: Pool) -> Window | None:
        # Dropped ones first: nobody needs their bytes.
        for number, (window, its_pool) in enumerate(self._dropped):
            if its_pool is pool:
                del self._dropped[number]
                return window
        # The last one opened is the last one that the update will take.
        for first, (window, its_pool) in reversed(self._windows.items()):
            if its_pool is pool:
                del self._windows[first]
                return window
        return None

    def drop_all(self) -> None:
        """Wait for all reads and release their buffers."""
        with self._access:
            windows = [window for window, _ in (*self._dropped, *self._windows.values())]
            self._dropped.clear()
            self._windows.clear()
        for window in windows:
            _abandon(window)


def _abandon(window: Window) -> None:
    """Release the buffer once the read has ended. Its OSError is ignored, since nobody needs the bytes."""
    try:
        with contextlib.suppress(OSError):
            window.arrived.wait()
    finally:
        window.release()
