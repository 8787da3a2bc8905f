"""Reads a stored gradient piece by piece, so that adding to it takes no buffer of a whole shard."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence

import torch

from infinity.grads.pieces import Piece
from infinity.plan.placement import EXTENT_ALIGNMENT, Extent
from infinity.tiers.base import Tier, Window
from infinity.tiers.pool import Pool


class StoredPieces:
    """The stored part of a shard. Slices of a piece can be read while `along` is at that piece.

    pieces: of the shard, all of them, in ascending order. pool: buffers of a piece with the blocks around it, for a
    tier on a disk, which reads the next pieces while one is added. A memory tier needs none.
    """

    def __init__(self, tier: Tier, extent: Extent, dtype: torch.dtype, pieces: Sequence[Piece], pool: Pool) -> None:
        self.itemsize = dtype.itemsize
        self._tier, self._extent, self._dtype, self._pool = tier, extent, dtype, pool
        self._unread = deque(pieces)
        self._windows: deque[Window] = deque()

    def __getitem__(self, elements: slice) -> torch.Tensor:
        window = self._windows[0]
        first = window.offset // self.itemsize
        return window.tensor.view(self._dtype)[elements.start - first : elements.stop - first]

    def along(self, arriving: Iterable[Piece]) -> Generator[Piece]:
        """Yield each of `pieces` once it and its stored part have arrived. Raises the error of a read."""
        try:
            for piece in arriving:
                self._read_ahead()
                self._windows[0].arrived.wait()
                yield piece
                self._windows.popleft().release()
        finally:
            for window in self._windows:
                with contextlib.suppress(Exception):  # these bytes are not used
                    window.arrived.wait()
                window.release()

    def _read_ahead(self) -> None:
        """Start to read the next pieces: one, and as many more as buffers are free."""
        while self._unread:
            start, nbytes = self._blocks(self._unread[0])
            if self._tier.kind.in_memory:
                window = self._tier.window(self._extent, start, nbytes, self._pool)
                assert window is not None
            else:
                # Waits only for the piece that is needed now; the ones ahead take what is free.
                lease = self._pool.lease(nbytes) if not self._windows else self._pool.try_lease(nbytes)
                if lease is None:
                    return
                with lease:
                    arrives = self._tier.read(self._extent, lease.tensor, start)
                    window = Window(lease.tensor, arrives, self._extent, start, lease.detach())
            self._windows.append(window)
            self._unread.popleft()

    def _blocks(self, piece: Piece) -> tuple[int, int]:
        """Return the first byte and the bytes of the blocks that a piece is in."""
        # A disk is read in whole blocks, and pieces are cut at tiles of the norm.
        start = piece[0] * self.itemsize // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        stop = -(-piece[1] * self.itemsize // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        return start, min(stop, self._extent.nbytes) - start
