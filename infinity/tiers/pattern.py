"""What belongs at each offset of a file that is measured with, known without reading it.

A stretch of memory in which no word appears twice, read as a circle: byte o of the file is byte o + shift of it.  The
shift is another one in each generation, so a write that did not happen leaves bytes that are wrong.  The circle is a
prime number of pages long: no confusion of offsets that comes of blocks, chunks or powers of two finds the right bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from infinity.tiers.memory import host_tensor

PAGE = 4096
"""Offsets, sizes and addresses are multiples of this many bytes, so that all I/O is direct."""

PERIOD = 16381 * PAGE
_SHIFT = 1009 * PAGE


class Pattern:
    """The bytes that belong at each offset of a file, for any number of generations of them."""

    def __init__(self, longest: int) -> None:
        """`longest`: bytes of the longest stretch that is asked for at once."""
        self.memory = host_tensor(PERIOD + longest)
        self.nbytes = self.memory.numel()
        words = self.memory.numpy().view(np.uint64)
        index = np.arange(PERIOD // 8, dtype=np.uint64)
        index += np.uint64(1)
        index *= np.uint64(0x9E3779B97F4A7C15)  # odd, and the next step can be undone: no word comes twice
        index ^= index >> np.uint64(29)
        for start in range(0, len(words), len(index)):
            words[start : start + len(index)] = index[: len(words) - start]
        self._bytes = self.memory.numpy()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @staticmethod
    def position(offset: int, generation: int) -> int:
        """Where in the pattern the bytes begin that belong at `offset`."""
        return (offset + generation * _SHIFT) % PERIOD

    def expected(self, offset: int, nbytes: int, generation: int) -> NDArray[np.uint8]:
        """(nbytes,) uint8, a view."""
        start = self.position(offset, generation)
        return self._bytes[start : start + nbytes]
