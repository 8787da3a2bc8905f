"""Expected bytes at each offset of a benchmark file, without reading the file.

The pattern is a circular buffer in which no word appears twice: byte o of the file is byte o + shift of it. Each
generation has another shift, so a write that did not happen leaves wrong bytes. The length is a prime number of pages,
so offsets confused by blocks, chunks or powers of two give wrong bytes too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from infinity.tiers.memory import host_tensor

PAGE = 4096
"""Alignment in bytes of offsets, sizes and addresses, so that all I/O is direct."""

PERIOD = 16381 * PAGE
_SHIFT = 1009 * PAGE


class Pattern:
    """Expected bytes at each offset of a file, for any number of generations."""

    def __init__(self, longest: int) -> None:
        """longest: bytes of the longest range requested at once."""
        self.memory = host_tensor(PERIOD + longest)
        self.nbytes = self.memory.numel()
        words = self.memory.numpy().view(np.uint64)
        index = np.arange(PERIOD // 8, dtype=np.uint64)
        index += np.uint64(1)
        index *= np.uint64(0x9E3779B97F4A7C15)  # odd, and the next step is invertible, so no word appears twice
        index ^= index >> np.uint64(29)
        for start in range(0, len(words), len(index)):
            words[start : start + len(index)] = index[: len(words) - start]
        self._bytes = self.memory.numpy()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @staticmethod
    def position(offset: int, generation: int) -> int:
        """Return the position in the pattern of the bytes at `offset`."""
        return (offset + generation * _SHIFT) % PERIOD

    def expected(self, offset: int, nbytes: int, generation: int) -> NDArray[np.uint8]:
        """Return the expected bytes at `offset`: a view, uint8 (nbytes,)."""
        start = self.position(offset, generation)
        return self._bytes[start : start + nbytes]
