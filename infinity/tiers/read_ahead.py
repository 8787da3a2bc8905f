"""Reads of extents into host buffers before a device buffer is free for them."""

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
