"""Memory that saved tensors go to: its interface, and the room in host memory that the device copies.

The latter has pinned buffers, which later tensors of similar sizes use again.

Storages that autograd saved, and the tensors in them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import torch

from infinity.errors import LifetimeError
from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.device import Device
from infinity.tiers.memory import storage_users
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


class Alias(NamedTuple):
    """A saved tensor whose storage is in memory. `tensor` shares its version counter; version: when it was saved."""

    tensor: torch.Tensor
    version: int

    def check(self) -> torch.Tensor:
        """Return the tensor. Raises LifetimeError if it was edited in place since."""
        if self.tensor._version != self.version:
            raise edited(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


class Leftover(NamedTuple):
    """Memory and room of a storage that no graph needs any more. `transfer` may still use them."""

    transfer: Transfer | None
    memory: torch.Tensor | None
    extent: Extent | None


class Stored:
    """A storage that saved tensors share. Lives as long as one of them, so its memory is freed with the graph.

    | memory | extent | transfer | the bytes are                                           |
    | yes    | no     | no       | in memory only                                          |
    | yes    | yes    | yes      | on their way: `leaves` tells the direction              |
    | yes    | yes    | no       | in both places                                          |
    | no     | yes    | no       | in the room only                                        |
    """

    __slots__ = (
        "__weakref__", "aliases", "edits", "extent", "key", "leaves", "leftovers", "memory", "nbytes", "number",
        "spoiled", "transfer", "version",
    )  # fmt: skip

    def __init__(self, number: int, tensor: torch.Tensor, leftovers: deque[Leftover]) -> None:
        """number: position in the order of first saves. leftovers: receives memory and room at the end of this."""
        storage = tensor.untyped_storage()
        self.number = number
        self.nbytes = storage.nbytes()
        self.aliases: dict[int, Alias] = {}
        """Saved tensors in this storage as it was saved, while it is in memory, by a number of their own."""
        self.edits: dict[int, LifetimeError] = {}
        """Number of a saved tensor that was edited in place before the memory was dropped → error of its use."""
        self.spoiled: LifetimeError | None = None
        """Error of any use: bytes that had come back were edited in place, and left again."""
        self.extent: Extent | None = None
        self.transfer: Transfer | None = None
        self.leaves = False
        self.leftovers = leftovers
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.hold(whole.set_(storage, 0, (self.nbytes,), (1,)))

    def hold(self, memory: torch.Tensor) -> None:
        """Take `memory`, uint8 (nbytes,), the whole storage."""
        self.memory: torch.Tensor | None = memory
        self.key = key_of(memory)
        self.version = memory._version

    def is_shared(self) -> bool:
        """Return whether anything but saved tensors of this refers to the memory: nothing else can edit it then."""
        assert self.memory is not None
        return storage_users(self.memory) > _ALONE + len(self.aliases)

    def drop(self) -> None:
        """Free the memory, whose bytes are in the room. Records edits in place, which only `aliases` can show."""
        assert self.memory is not None
        for number, alias in list(self.aliases.items()):  # a garbage collection may remove some
            if alias.tensor._version != alias.version:
                self.edits[number] = edited(alias.tensor.shape, alias.tensor._version, alias.version)
        if self.memory._version != self.version:
            self.spoiled = edited((self.nbytes,), self.memory._version, self.version)
        self.aliases.clear()
        self.memory = None

    def check(self) -> None:
        """Raise LifetimeError if bytes that came back from the room were edited in place since."""
        assert self.memory is not None
        if self.spoiled is not None:
            raise self.spoiled
        if self.memory._version != self.version:
            raise edited((self.nbytes,), self.memory._version, self.version)

    def __del__(self) -> None:
        busy = self.transfer is not None and not self.transfer.done()
        if self.extent is not None:
            self.leftovers.append(Leftover(*((self.transfer, self.memory) if busy else (None, None)), self.extent))


def key_of(tensor: torch.Tensor) -> int:
    """Return a number of the tensor's storage, unique among those alive."""
    return int(tensor.untyped_storage()._cdata)


def edited(shape: torch.Size | tuple[int, ...], present: int, saved: int) -> LifetimeError:
    """Return the error of a saved tensor that was edited in place: torch's, with both versions."""
    return LifetimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor of shape {list(shape)} is at version {present}, but version {saved} was saved. Do the edit out of "
        "place, or after backward."
    )


_ALONE = storage_users(torch.empty(1))
"""`storage_users` of a storage with one tensor."""
