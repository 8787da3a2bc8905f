"""Reads of extents into host buffers before a device buffer is free for them.

Windows that are read before the update asks for them, into buffers that are free at the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch

from infinity import concurrency
from infinity.plan.placement import Extent
from infinity.plan.pools import STAGING_BYTES
from infinity.tiers.base import Window
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer


@dataclass
class Piece:
    """A part of an extent, of up to `STAGING_BYTES`, that is read into a leased host buffer."""

    arrived: Transfer
    lease: Lease

    def abandon(self) -> None:
        """Release the buffer once the read has ended. Its OSError is ignored, since nobody needs the bytes."""
        with self.lease, contextlib.suppress(OSError):
            self.arrived.wait()


class ReadAhead:
    """Pieces of extents that were read ahead, each extent's from its beginning on. Thread-safe."""

    def __init__(self, pool: Pool, read: Callable[[Extent, torch.Tensor, int], Transfer]) -> None:
        """read: starts a read of (extent, host memory, byte offset in the extent)."""
        self._pool = pool
        self._read = read
        self._access = concurrency.lock()
        self._pieces: dict[int, deque[Piece]] = {}
        """Offset of an extent in the tier → its pieces."""
        self._dropped: deque[Piece] = deque()
        """Pieces that nobody needs, whose read may not have ended."""

    def want(self, extents: Iterable[Extent]) -> None:
        """Start reading `extents` in this order, as far as buffers are free. Drops what was read of other extents.

        Does not wait. No write of these extents may be under way. Takes no more of `extents` than it needs to decide.
        """
        coming, nearest = iter(extents), list[Extent]()
        with self._access:
            others = set(self._pieces)
            # Stops once each extent that was read is known to be wanted: the rest of a long trace is not looked at.
            while others and (extent := next(coming, None)) is not None:
                others.discard(extent.offset)
                nearest.append(extent)
            for offset in [offset for offset in self._pieces if offset in others]:
                self._dropped += self._pieces.pop(offset)
            # Buffers of dropped reads that have ended are free for the extents that come.
            self._release_ended()
            for extent in chain(nearest, coming):
                if not self._extend(extent):
                    return

    def _extend(self, extent: Extent) -> bool:
        """Start reading the rest of an extent. Returns False if the buffers do not suffice."""
        pieces = self._pieces.setdefault(extent.offset, deque())
        for position in range(len(pieces) * STAGING_BYTES, extent.nbytes, STAGING_BYTES):
            lease = self._pool.try_lease(min(STAGING_BYTES, extent.nbytes - position))
            if lease is None:
                return False
            try:
                pieces.append(Piece(self._read(extent, lease.tensor, position), lease))
            except OSError:  # the read that needs the bytes raises it
                lease.release()
                return False
        return True

    def take(self, extent: Extent) -> deque[Piece]:
        """Return the pieces of an extent, whose buffers the caller releases."""
        with self._access:
            return self._pieces.pop(extent.offset, deque())

    def forget(self, extent: Extent) -> None:
        """Drop what was read of an extent that is about to be written."""
        with self._access:
            self._dropped += self._pieces.pop(extent.offset, ())
            self._release_ended()

    def _release_ended(self) -> None:
        # Only those that have ended, so that this never waits.
        while self._dropped and self._dropped[0].arrived.done():
            self._dropped.popleft().abandon()

    def close(self) -> None:
        """Wait for all reads and release their buffers."""
        with self._access:
            for pieces in (self._dropped, *self._pieces.values()):
                while pieces:
                    pieces.popleft().abandon()
            self._pieces.clear()


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
