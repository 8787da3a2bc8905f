"""What stands in a file that is measured with, page by page, and whether what was read of it is that."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity import _aio
from infinity.tiers.pattern import PAGE, Pattern

_KEPT = 1 << 16
"""Checksums that are remembered, at most."""


class WrongByte(NamedTuple):
    offset: int
    found: int
    wanted: int


class Contents:
    """The generation of each page of `nbytes` bytes, so what belongs in it.  No stretch that is asked for is longer
    than `longest` bytes, and all begin and end with a page."""

    def __init__(self, nbytes: int, longest: int) -> None:
        self.pattern = Pattern(longest)
        self.generations = np.zeros(nbytes // PAGE, dtype=np.int32)  # of each page, as last written
        self._generation = 0
        self._checksums: dict[tuple[int, int], int] = {}  # of (position, bytes) of the pattern

    def begin_generation(self) -> None:
        """What is written from now on differs from what was written before."""
        self._generation += 1

    def written(self, offset: int, nbytes: int) -> int:
        """Notes that these bytes are overwritten; returns the address of what is to be written."""
        self._pages(offset, nbytes)[:] = self._generation
        return self.pattern.address + self.pattern.position(offset, self._generation)

    def checksum(self, offset: int, nbytes: int) -> int | None:
        """Of what belongs there, computed once; None where pages were written in different generations."""
        pages = self._pages(offset, nbytes)
        first = int(pages[0])
        if (pages != first).any():
            return None
        key = self.pattern.position(offset, first), nbytes
        if key not in self._checksums:
            if len(self._checksums) >= _KEPT:
                self._checksums.clear()
            self._checksums[key] = _aio.checksum(self.pattern.address + key[0], nbytes)
        return self._checksums[key]

    def wrong_byte(self, offset: int, found: NDArray[np.uint8], *, exactly: bool = False) -> WrongByte | None:
        """The first byte of `found` that does not belong at its place in what begins at `offset`.

        By the checksum, unless `exactly` or where there is none: that reads half as much, and without the GIL.
        """
        if not exactly and self.checksum(offset, len(found)) == _aio.checksum(found.ctypes.data, len(found)):
            return None
        pages = self._pages(offset, len(found))
        edges = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), len(pages)]
        for first, last in itertools.pairwise(edges):
            start, part = offset + first * PAGE, found[first * PAGE : last * PAGE]
            wanted = self.pattern.expected(start, len(part), int(pages[first]))
            if not np.array_equal(part.view(np.uint64), wanted.view(np.uint64)):
                where = int(np.argmax(part != wanted))
                return WrongByte(start + where, int(part[where]), int(wanted[where]))
        return None

    def _pages(self, offset: int, nbytes: int) -> NDArray[np.int32]:
        """A view."""
        return self.generations[offset // PAGE : (offset + nbytes) // PAGE]
