"""Space on nvme for extents that rarely hold bytes: a write reserves it, and it is released after `discard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity import concurrency
from infinity.errors import InfinityError
from infinity.plan.placement import Extent, aligned
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool
from infinity.tiers.transfer import Transfer

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
