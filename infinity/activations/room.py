"""Memory that saved tensors go to: its interface, and the room in host memory that the device copies.

The latter has pinned buffers, which later tensors of similar sizes use again.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.device import Device
from infinity.tiers.transfer import DONE, Transfer


class Room(Protocol):
    """Memory of a slower tier, which grows as it is needed. Called by one thread at a time."""

    kind: TierKind
    """Host or nvme."""
    staging_nbytes: int
    """Bytes of host buffers of its own, counted by the plan."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved at present."""

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def blocks_repaired(self) -> int:
        """Blocks that did not match their checksum when they were read, and did in a second read."""

    def reserve(self, nbytes: int) -> Extent:
        """Return room for `nbytes`. Raises OutOfSpaceError or OutOfMemoryError."""

    def free(self, extent: Extent) -> None:
        """Return the room of an extent, which no transfer uses."""

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Write `source`, uint8 (extent.nbytes,), after the compute that this thread issued so far.

        `source` must neither change nor be freed until the transfer is done.
        """

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        """Fill `destination`, uint8 (extent.nbytes,), after the compute that this thread issued so far."""

    def close(self) -> None:
        """Release everything. No transfer may be under way."""


_SLACK = 4
"""A buffer is used for tensors that leave at most 1/`_SLACK` of it unused."""


class HostRoom:
    """Pinned host memory. Buffers take at most the bytes that were in use at once."""

    kind = TierKind.HOST
    staging_nbytes = 0
    blocks_repaired = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._used: dict[int, torch.Tensor] = {}
        """Offset of an extent, which is only a number → its buffer."""
        self._reads: dict[int, Transfer] = {}
        """Offset of an extent → its last copy to the device, which compute may have awaited, and not the host."""
        self._free: list[tuple[torch.Tensor, Transfer]] = []
        """Buffers and the last copies from them. Least recently freed first."""
        self._number = 0
        self._peak = 0
        """The most bytes of buffers that were in use at once."""
        self.nbytes = 0
        self.bytes_read = 0
        self.bytes_written = 0

    def reserve(self, nbytes: int) -> Extent:
        buffer = self._fitting(nbytes)
        if buffer is None:
            self._trim(nbytes)
            buffer = self._device.host_buffer(nbytes)
            self.nbytes += nbytes
        self._number += 1
        self._used[self._number] = buffer
        self._peak = max(self._peak, self._in_use())
        return Extent(TierKind.HOST, self._number, nbytes, "saved activations")

    def free(self, extent: Extent) -> None:
        self._free.append((self._used.pop(extent.offset), self._reads.pop(extent.offset, DONE)))

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        self.bytes_written += extent.nbytes
        with self._device.recorder.naming(extent.name, "activations"):
            return self._device.copy(self._used[extent.offset][: extent.nbytes], source)

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        self.bytes_read += extent.nbytes
        with self._device.recorder.naming(extent.name, "activations"):
            copy = self._device.copy(destination, self._used[extent.offset][: extent.nbytes])
        self._reads[extent.offset] = copy
        return copy

    def close(self) -> None:
        for copy in (*self._reads.values(), *(copy for _, copy in self._free)):
            copy.wait()
        self._used.clear()
        self._reads.clear()
        self._free.clear()
        self.nbytes = 0

    def _fitting(self, nbytes: int) -> torch.Tensor | None:
        """Remove and return the smallest free buffer for `nbytes`, if one is of a similar size."""
        found = [
            (buffer.numel(), place)
            for place, (buffer, _) in enumerate(self._free)
            if nbytes <= buffer.numel() <= nbytes + nbytes // (_SLACK - 1)
        ]
        return self._free.pop(min(found)[1])[0] if found else None  # a copy into it follows compute, hence the last one

    def _in_use(self) -> int:
        return self.nbytes - sum(buffer.numel() for buffer, _ in self._free)

    def _trim(self, nbytes: int) -> None:
        """Release free buffers, so that a new one of `nbytes` does not raise the total above the peak in use."""
        limit = max(self._peak, self._in_use() + nbytes)
        while self._free and self.nbytes + nbytes > limit:
            buffer, copy = self._free.pop(0)
            copy.wait()  # the memory is unpinned and unmapped here
            self.nbytes -= buffer.numel()
