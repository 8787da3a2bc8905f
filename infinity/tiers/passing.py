"""Memory for extents that rarely hold bytes: a write allocates it, and it is released some time after `discard`.

Space on nvme for extents that rarely hold bytes: a write reserves it, and it is released after `discard`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import concurrency
from infinity.errors import InfinityError
from infinity.plan.placement import Extent, aligned
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool
from infinity.tiers.slab import MemoryTier
from infinity.tiers.transfer import Transfer


class PassingTier(MemoryTier):
    """Extents in device memory or in unpinned host memory, each in an allocation of its own.

    Extents are written whole. A write replaces bytes that were not discarded, so that their readers keep them. It takes
    the allocation of discarded ones, since a unit that is written in one step may be written in each.
    """

    def __init__(self, kind: TierKind, device: Device) -> None:
        super().__init__(kind, device)
        self._held: dict[int, torch.Tensor] = {}
        """Offset of an extent → its memory."""
        self._spare: dict[int, torch.Tensor] = {}
        """The same for extents that were discarded since the last `trim`, and before it."""
        self._old: dict[int, torch.Tensor] = {}
        self._access = concurrency.lock()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that are allocated at present."""
        with self._access:
            return sum(memory.numel() for each in (self._held, self._spare, self._old) for memory in each.values())

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        assert offset == 0 and source.numel() == extent.nbytes
        with self._access:
            memory = self._spare.pop(extent.offset, None)
            if memory is None:
                memory = self._old.pop(extent.offset, None)
        if memory is None:
            memory = self._allocate(extent.nbytes)
        with self._copying("device_to_host", extent):
            written = self._device.copy(memory, source)
        # Only now: a copy that fails to start leaves the former bytes, and their memory lives on with their readers.
        with self._access:
            self._held[extent.offset] = memory
        return written

    def discard(self, extent: Extent, read: torch.Tensor | None = None) -> None:
        with self._access:
            memory = self._held.get(extent.offset)
            # The extent may have been written again since `read` was opened: those bytes are needed.
            if memory is not None and (read is None or _shares_storage(memory, read)):
                self._spare[extent.offset] = self._held.pop(extent.offset)

    def trim(self) -> None:
        with self._access:
            # Two calls, so that memory that each step uses is not freed and allocated in each step.
            self._old, self._spare = self._spare, {}

    def clear(self) -> None:
        """Release all memory. No bytes may be held."""
        with self._access:
            assert not self._held
            self._spare, self._old = {}, {}

    def free_memory(self) -> None:
        with self._access:
            self._held, self._spare, self._old = {}, {}, {}

    def _view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        with self._access:
            memory = self._held.get(extent.offset)
        if memory is None:
            raise InfinityError(f"internal error: the {extent.name} was read and is not stored")
        return memory[offset : offset + nbytes]


def _shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


_WRITTEN = 0
"""In place of an address: no window has been opened since the last write."""


class PassingSpace(Tier):
    """Extents of an nvme tier, all of which are reserved at start. They are written whole.

    An extent that is not written for two calls of `trim` is given back to the file system, and reserved again before
    its next write. Where the file system makes no holes in files, the space stays reserved.
    """

    kind = TierKind.NVME

    def __init__(self, tier: NvmeTier, extents: Sequence[Extent]) -> None:
        self._tier = tier
        self._held: dict[int, int] = {}
        """Offset of an extent with bytes → address of the window that was opened last."""
        self._spare = {extent.offset: extent for extent in extents}
        """Extents that are reserved and were discarded since the last `trim`, and before it."""
        self._old: dict[int, Extent] = {}
        self._sizes = {extent.offset: aligned(extent.nbytes) for extent in extents}
        self._makes_holes = True
        self._access = concurrency.lock()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that are reserved at present."""
        with self._access:
            return sum(self._sizes[offset] for each in (self._held, self._spare, self._old) for offset in each)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        assert offset == 0 and source.numel() == extent.nbytes
        self.reserve(extent)
        return self._tier.write(extent, source)

    def reserve(self, extent: Extent) -> None:
        offset = extent.offset
        with self._access:
            # Reserved before the extent is noted as held: an OutOfSpaceError leaves everything as it was.
            if not any(offset in each for each in (self._held, self._spare, self._old)):
                self._tier.reserve_space(extent)
            self._spare.pop(offset, None)
            self._old.pop(offset, None)
            self._held[offset] = _WRITTEN

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        self._check_held(extent)
        return self._tier.read(extent, destination, offset)

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        self._check_held(extent)
        window = self._tier.window(extent, offset, nbytes, pool)
        if window is not None:
            with self._access:
                # `discard` compares it: a write since then has put `_WRITTEN` in its place.
                self._held[extent.offset] = window.tensor.data_ptr()
        return window

    def _check_held(self, extent: Extent) -> None:
        with self._access:
            if extent.offset not in self._held:
                raise InfinityError(f"internal error: the {extent.name} was read and is not stored")

    def store(self, window: Window) -> Transfer:
        return self._tier.store(window)

    def discard(self, extent: Extent, read: torch.Tensor | None = None) -> None:
        with self._access:
            address = self._held.get(extent.offset)
            if address is not None and (read is None or address == read.data_ptr()):
                del self._held[extent.offset]
                self._spare[extent.offset] = extent

    def trim(self) -> None:
        with self._access:
            if self._makes_holes:
                self._release(self._old)
                # `_release` has emptied the old one, or the file system makes no holes and its space stays reserved.
                self._old, self._spare = self._spare, self._old

    def clear(self) -> None:
        """Release all space that holds no bytes."""
        with self._access:
            for extents in (self._spare, self._old):
                self._release(extents)

    def _release(self, extents: dict[int, Extent]) -> None:
        while extents and self._makes_holes:
            offset, extent = extents.popitem()
            self._makes_holes = self._tier.release_space(extent)
            if not self._makes_holes:
                extents[offset] = extent
