"""Expected contents of a benchmark file at each offset, without reading the file, and verification of reads.

The pattern is a circular buffer in which no word appears twice: byte o of the file is byte o + shift of it. Each
generation has another shift, so a write that did not happen leaves wrong bytes. The length is a prime number of pages,
so offsets confused by blocks, chunks or powers of two give wrong bytes too.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.native import _aio
from infinity.tiers.memory import host_tensor

PAGE = 4096
"""Alignment in bytes of offsets, sizes and addresses, so that all I/O is direct."""

PERIOD = 16381 * PAGE
_SHIFT = 1009 * PAGE


_CACHED = 1 << 16
"""Largest number of cached checksums."""


def _position(offset: int, generation: int) -> int:
    """Return the position in the pattern of the bytes at `offset`."""
    return (offset + generation * _SHIFT) % PERIOD


class WrongByte(NamedTuple):
    offset: int
    read: int
    expected: int


class Contents:
    """Generation of each page of a file of `nbytes` bytes, which determines its contents, and the pattern.

    Ranges in the methods begin and end at pages and have at most `longest` bytes.
    """

    def __init__(self, nbytes: int, longest: int) -> None:
        self.memory = host_tensor(PERIOD + longest)
        """The pattern."""
        words = self.memory.numpy().view(np.uint64)
        index = np.arange(PERIOD // 8, dtype=np.uint64)
        index += np.uint64(1)
        index *= np.uint64(0x9E3779B97F4A7C15)  # odd, and the next step is invertible, so no word appears twice
        index ^= index >> np.uint64(29)
        for start in range(0, len(words), len(index)):
            words[start : start + len(index)] = index[: len(words) - start]
        self._bytes = self.memory.numpy()
        self.generations = np.zeros(nbytes // PAGE, dtype=np.int32)  # (pages,), generation of the last write
        self._generation = 0
        self._checksums: dict[tuple[int, int], int] = {}  # (position, bytes) in the pattern → checksum

    def begin_generation(self) -> None:
        """Begin a generation, whose writes differ from all earlier ones."""
        self._generation += 1

    def written(self, offset: int, nbytes: int) -> int:
        """Record that these bytes are overwritten. Returns the address of the bytes to write."""
        self._pages(offset, nbytes)[:] = self._generation
        return self.memory.data_ptr() + _position(offset, self._generation)

    def checksum(self, offset: int, nbytes: int) -> int | None:
        """Return the checksum of the expected bytes; None if pages are of different generations."""
        pages = self._pages(offset, nbytes)
        first = int(pages[0])
        if (pages != first).any():
            return None
        key = _position(offset, first), nbytes
        if key not in self._checksums:
            if len(self._checksums) >= _CACHED:
                self._checksums.clear()
            self._checksums[key] = _aio.checksum(self.memory.data_ptr() + key[0], nbytes)
        return self._checksums[key]

    def expected(self, offset: int, nbytes: int, generation: int) -> NDArray[np.uint8]:
        """Return the expected bytes at `offset`: a view, uint8 (nbytes,)."""
        start = _position(offset, generation)
        return self._bytes[start : start + nbytes]

    def wrong_byte(self, offset: int, content: NDArray[np.uint8], *, exactly: bool = False) -> WrongByte | None:
        """Return the first wrong byte of `content`, which was read at `offset`; None if all are correct.

        Compares checksums, unless `exactly` is set or there is none. Checksums read half as much, without the GIL.
        """
        if not exactly and self.checksum(offset, len(content)) == _aio.checksum(content.ctypes.data, len(content)):
            return None
        pages = self._pages(offset, len(content))
        edges = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), len(pages)]
        for first, last in itertools.pairwise(edges):
            start, part = offset + first * PAGE, content[first * PAGE : last * PAGE]
            expected = self.expected(start, len(part), int(pages[first]))
            if not np.array_equal(part.view(np.uint64), expected.view(np.uint64)):
                where = int(np.argmax(part != expected))
                return WrongByte(start + where, int(part[where]), int(expected[where]))
        return None

    def _pages(self, offset: int, nbytes: int) -> NDArray[np.int32]:
        """Return a view of the generations of these pages."""
        return self.generations[offset // PAGE : (offset + nbytes) // PAGE]
