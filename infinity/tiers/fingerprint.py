"""Fingerprints of memory on a device: the hash of `infinity.native._adam.fingerprint`, without a copy to the host."""

from __future__ import annotations

from typing import TypeAlias

import torch

from infinity.native import cuda

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
