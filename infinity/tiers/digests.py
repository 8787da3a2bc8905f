"""Digests of extents: eight bytes for each, which prove that bytes of a file are those that were written.

    digest = BLAKE2b, 8 bytes, of the checksums (CRC-32C, u32, 1 in place of 0) of the extent's blocks

The I/O threads compute the checksums when they write, so that nothing is read again for a digest.

Fingerprints of memory on a device: the hash of `infinity.native._adam.fingerprint`, without a copy to the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from infinity.native import _aio, cuda

WIDTH = 8
"""Bytes of a digest."""
PART = 8 << 20
"""Bytes that are read at once, a multiple of any block."""
Read = Callable[[int, int], torch.Tensor]
"""(byte of the file, number of bytes) → the bytes, valid until the next call."""


@dataclass(frozen=True)
class Digests:
    """Digests of a commit's extents, in the order of the plan. block: bytes of a checksum's block."""

    block: int
    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // WIDTH

    def __getitem__(self, number: int) -> bytes:
        return self.packed[number * WIDTH : (number + 1) * WIDTH]


def digest_of_written(checksums: bytes, place: int, nbytes: int, block: int) -> bytes | None:
    """Return the digest of bytes [place, place + nbytes) of a file; None if this process never wrote some of them.

    checksums: of the file's blocks, as `_aio.File.checksums`.
    """
    part = np.frombuffer(checksums, dtype=np.uint32)[place // block : -(-(place + nbytes) // block)]
    # 0 means that the block has no checksum; a checksum of 0 is kept as 1.
    return _digest(part) if part.all() else None


def digest_of(read: Read, place: int, nbytes: int, block: int) -> bytes:
    """Return the digest of bytes [place, place + nbytes) of a file."""
    return _digest(np.fromiter(_sums(read, place, nbytes, block), dtype=np.uint32))


def _sums(read: Read, place: int, nbytes: int, block: int) -> Iterator[int]:
    for start in range(0, nbytes, PART):
        part = read(place + start, min(PART, nbytes - start))
        address, length = part.data_ptr(), part.numel()
        for offset in range(0, length, block):
            yield _aio.checksum(address + offset, min(block, length - offset)) or 1


def _digest(sums: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> bytes:
    # Little-endian on each machine, since a run may be resumed on another one.
    return hashlib.blake2b(sums.astype("<u4").tobytes(), digest_size=WIDTH).digest()


Fingerprint: TypeAlias = int | torch.Tensor
"""An int, or an int64 scalar on the device. Compare by `!=`, whose truth waits for the device."""

# As a signed number, since torch has no arithmetic of unsigned ones.
_KEY = 0x9E3779B97F4A7C15 - (1 << 64)
_PIECE = 1 << 22  # words of 8 bytes


def fingerprint_by_torch(memory: torch.Tensor) -> torch.Tensor:
    """Compute `_adam.fingerprint` by torch operations on the device of `memory`, in pieces to bound temporaries.

    Returns an int64 scalar there: the hash's bits, as of a signed number.
    """
    words = memory.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        keys = torch.arange(start + 1, start + 1 + piece.numel(), device=memory.device) * _KEY
        # Shifts of signed numbers copy the sign, which the masks remove.
        mixed = piece ^ keys
        total += ((mixed & 0xFFFFFFFF) * (mixed >> 32 & 0xFFFFFFFF) + (piece << 32 | piece >> 32 & 0xFFFFFFFF)).sum()
    return total


def fingerprint_on_device(memory: torch.Tensor) -> torch.Tensor:
    """Compute `_adam.fingerprint` of `memory`, uint8 (n,), n a multiple of 8, on its device and current stream.

    Returns an int64 scalar there: the hash's bits, as of a signed number. Does not wait.
    """
    if not memory.is_cuda or not cuda.available():
        return fingerprint_by_torch(memory)
    import infinity.native._adam_cuda as native

    out = torch.zeros((), dtype=torch.int64, device=memory.device)
    where = {"device": memory.get_device(), "stream": torch.cuda.current_stream(memory.device).cuda_stream}
    native.fingerprint(memory.data_ptr(), memory.numel(), out=out.data_ptr(), **where)
    return out
