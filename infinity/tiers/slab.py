"""The device and host tiers: one slab of memory each; extents are views of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.memory import first_touch
from infinity.tiers.pool import Pool
from infinity.tiers.spares import Spares
from infinity.tiers.transfer import DONE, Transfer


class MemoryTier(Tier):
    """Extents in device memory or in host memory: windows are views of it."""

    def __init__(self, kind: TierKind, device: Device) -> None:
        self.kind = kind
        self.immediate = device.host_addressable
        self._device = device

    @abstractmethod
    def _view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + nbytes) of an extent."""

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        with self._copying("host_to_device", extent):
            return self._device.copy(destination, self._view(extent, offset, destination.numel()))

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        return Window(self._view(extent, offset, nbytes), DONE, extent, offset)

    def store(self, window: Window) -> Transfer:
        return DONE

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._device.empty(nbytes) if self.kind.on_device else self._device.host_buffer(nbytes, pin=False)

    def _copying(self, lane: str, extent: Extent) -> AbstractContextManager[None]:
        return self._device.recorder.naming(extent.name, "" if self.kind.on_device else lane)


class SlabTier(MemoryTier):
    """A slab of `nbytes` of device memory or of host memory."""

    def __init__(
        self,
        kind: TierKind,
        nbytes: int,
        device: Device,
        *,
        pinned: Sequence[tuple[int, int]] = (),
        spares: Mapping[Extent, Extent] = MappingProxyType({}),
    ) -> None:
        """pinned: bytes [start, stop) of host memory that the device copies, in ascending order. spares: as of
        `Spares`.
        """
        super().__init__(kind, device)
        self.nbytes = nbytes
        self._spares = Spares(spares)
        self._is_offloaded = False
        self._written: set[int] = set()
        self.writes: dict[int, int] = {}
        """Offset of an extent → number of calls of `write`."""
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        """(place, bytes) → view of the slab, for windows: an update opens the same ones in each step."""
        # Not pinned as a whole: only what the device copies is registered, which takes time for each page.
        self._slab = self._allocate(nbytes)
        if self._slab.is_cpu:
            first_touch(self._slab)
            device.pin(self._slab, pinned)  # after the touch, since it would place all pages on this thread's node

    def offload(self) -> None:
        """Move a slab of device memory to host memory, until `reload`. Extents can be read and written meanwhile.

        No-op if the device computes in host memory. Idempotent.
        """
        if not self.kind.on_device or self._device.host_addressable or self._is_offloaded:
            return
        self._move(self._device.host_buffer(self.nbytes, pin=False))
        self._is_offloaded = True

    def reload(self) -> None:
        """Move the slab back to the device. Idempotent."""
        if self._is_offloaded:
            self._move(self._device.empty(self.nbytes))
            self._is_offloaded = False

    def free_memory(self) -> None:
        self._slab, self._opened = self._slab.new_empty(0), {}

    def _move(self, slab: torch.Tensor) -> None:
        # The former slab is freed by the next line, and no stream would keep it alive.
        self._device.copy(slab, self._slab).wait()
        self._slab = slab
        self._opened = {}

    def _view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        start = self._spares.to_read(extent) + offset
        return self._slab[start : start + nbytes]

    def _target(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes that a write of [offset, offset + nbytes) changes."""
        start = self._spares.to_write(extent) + offset
        return self._slab[start : start + nbytes]

    def begin_draft(self, extent: Extent) -> bool:
        return self._spares.begin(extent)

    def end_draft(self, extent: Extent, *, keep: bool) -> None:
        self._spares.end(extent, keep=keep)

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        before = self._view(extent, offset, nbytes) if self._spares.is_drafted(extent) else None
        place = self._spares.to_write(extent) + offset, nbytes
        opened = self._opened.get(place)
        if opened is None:
            opened = self._opened[place] = self._target(extent, offset, nbytes)
        return Window(opened, DONE, extent, offset, before=before)

    def fetch(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        with self._copying("host_to_device", extent):
            stored = self._view(extent, 0, extent.nbytes)
            if extent.code is not None:
                return self._device.decode_parameters(extent.code, destination, stored)
            return self._device.copy_parameters(destination, stored)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        self._written.add(extent.offset)
        self.writes[extent.offset] = self.writes.get(extent.offset, 0) + 1
        with self._copying("device_to_host", extent):
            return self._device.copy(self._target(extent, offset, source.numel()), source)

    def memory(self, extent: Extent) -> torch.Tensor:
        """Return the bytes of an extent, uint8 (nbytes,): a view of the slab."""
        return self._target(extent, 0, extent.nbytes)

    def before(self, extent: Extent) -> torch.Tensor | None:
        return self._view(extent, 0, extent.nbytes) if self._spares.is_drafted(extent) else None

    def take_written(self) -> set[int]:
        """Return the offsets of extents that `write` has changed since the last call; updates work in place."""
        written, self._written = self._written, set()
        return written
