"""Host memory that is left while a model runs for the first time [Note: memory that no plan counts].

A plan counts no activations, since they depend on the batch. A process that exceeds the memory of its container is
killed without a message, so the first passes compare what is left with what the last unit took.
"""

from __future__ import annotations

import resource
from pathlib import Path

from infinity.errors import OutOfMemoryError
from infinity.sizes import show_bytes
from infinity.tiers.available import available_memory

_LEAST = 16 << 20
"""Bytes below which the next allocation of any kind may fail."""


class Headroom:
    """Raises OutOfMemoryError in a model's first `uses` of units before the kernel would kill the process."""

    def __init__(self, uses: int) -> None:
        self._uses = uses
        self._held = _private_bytes() if uses else 0
        self._at_start = self._held

    def follow(self, unit: str) -> None:
        """Check what is left before `unit` is used. No-op after `uses` calls."""
        if not self._uses:
            return
        self._uses -= 1
        before, self._held = self._held, _private_bytes()
        # The growth is this process's: others may take and leave gigabytes in the meantime.
        grown = self._held - before
        left, needed = available_memory(), max(_LEAST, grown)
        if left >= needed:
            return
        taken = show_bytes(max(0, self._held - self._at_start))
        raise OutOfMemoryError(
            "host memory",
            needed,
            left,
            f"the model's first pass has taken {taken} beside the engine's buffers until unit {unit}, which are mostly "
            "activations. Lower the micro-batch, checkpoint activations, or set infinity.activations.device to "
            '"nvme". Lower infinity.unit_size or infinity.prefetch_bytes to make the buffers smaller',
        )


def _private_bytes() -> int:
    """Return the resident bytes of this process without those of files."""
    _, resident, shared = Path("/proc/self/statm").read_bytes().split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()
