"""Warns before a process takes the last of its host memory [Note: memory that no plan counts].

A plan counts no activations, since they depend on the batch. A process that exceeds the memory of its container is
killed without a message.
"""

from __future__ import annotations

import os
import resource

from infinity.concurrency import now
from infinity.observe.log import logger
from infinity.sizes import format_size, show_bytes
from infinity.tiers.available import available_memory

_INTERVAL = 0.005
"""Seconds between two looks, each of which takes 6 microseconds: small units take less, and no memory to speak of."""
_GROWN = 4 << 20
"""Bytes by which the process's peak grows before what is left is looked at, which takes a quarter of a millisecond."""
_LEAST = 16 << 20
"""Bytes below which the next allocation of any kind may fail."""


class Headroom:
    """Logs one warning if less host memory is left than the model has taken since the last look."""

    def __init__(self, largest: int = 0, *, watches: bool = True) -> None:
        """largest: bytes of the largest unit, if a lower infinity.unit_size divides it; else 0."""
        self._largest = largest
        self._watches = watches
        self._looked = 0.0
        self._peak: int | None = None
        """The most resident bytes at a use of a unit. None before the first: until then, a script may load its data."""

    def follow(self, unit: str) -> None:
        """Look at what is left before `unit` is used, if the process has a new peak."""
        if not self._watches or (moment := now()) - self._looked < _INTERVAL:
            return
        self._looked = moment
        resident = _resident()
        if self._peak is None:
            self._peak = resident
        if (grown := resident - self._peak) < _GROWN:
            return
        self._peak = resident
        left = available_memory()
        if left >= max(_LEAST, grown):
            return
        # Once: a step that memory does not hold would repeat it for each unit.
        self._watches = False
        # No error: the units that follow may need less, and only the kernel knows what it can reclaim.
        logger.warning(
            "host memory: %s are left before unit %s, and the model has just taken %s, mostly activations. If memory "
            "runs out, the kernel kills the process (exit status 137), or under a ulimit an allocation fails. "
            "Lower the micro-batch%s or checkpoint activations (torch.utils.checkpoint). "
            "MALLOC_MMAP_THRESHOLD_=1048576 in the environment returns freed blocks to the system. If activations take "
            'several hundred MB, infinity.activations.device "nvme" moves them to the drive.',
            show_bytes(left),
            unit,
            show_bytes(grown),
            self._smaller_buffers(),
        )

    def _smaller_buffers(self) -> str:
        """Return the change that shrinks buffers: a unit_size of at most half the largest unit."""
        if not self._largest:
            return ""
        half = format_size(1 << max(12, (self._largest // 2).bit_length() - 1))
        largest = show_bytes(self._largest)
        return f', set infinity.unit_size to "{half}" for smaller buffers (the largest unit has {largest}),'


def _resident() -> int:
    """Return the resident bytes of this process. getrusage's peak would be the parent's, if that was larger at fork."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)
