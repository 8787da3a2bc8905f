"""Tiers without bytes: extents of the meta device, and transfers that take time."""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.plan.placement import Extent
from infinity.plan.plan import Plan
from infinity.plan.pools import READ_AHEAD
from infinity.sim.clock import Clock
from infinity.sim.lanes import Drive, DriveEngine
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Transfer


def open_simulated(plan: Plan, device: Device, clock: Clock, drive: Drive | None) -> dict[TierKind, Tier]:
    """Return kind → tier, for the tiers that hold extents."""
    return {
        kind: SimulatedSlab(kind, plan, device, clock) if kind.in_memory else _nvme(plan, device, drive)
        for kind in sorted(plan.placement.nbytes, key=lambda kind: kind.in_memory)
    }


class SimulatedSlab(SlabTier):
    """The engine's slab, whose copies carry the names of extents."""

    def __init__(self, kind: TierKind, plan: Plan, device: Device, clock: Clock) -> None:
        super().__init__(kind, plan.placement.nbytes[kind], device)
        self._clock = clock

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        with self._clock.naming(extent.name):
            return super().read(extent, destination, offset)

    def fetch(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        with self._clock.naming(extent.name):
            return super().fetch(extent, destination)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        with self._clock.naming(extent.name):
            return super().write(extent, source, offset)


class SimulatedNvme(NvmeTier):
    """The engine's nvme tier over a simulated drive. It counts bytes as the native I/O engine does."""

    def __init__(self, plan: Plan, device: Device, drive: Drive) -> None:
        assert plan.io is not None
        self._requests = DriveEngine(drive)
        parts: Any = self._requests  # in place of a file and of the native engine
        super().__init__(parts, plan.io.reserved, parts, device, 0, plan.buffers_of(READ_AHEAD))

    @property
    def blocks_repaired(self) -> int:
        return 0

    def release_space(self, extent: Extent) -> bool:
        return True

    def reserve_space(self, extent: Extent) -> None:
        """Space is not limited."""

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.read(extent.name, memory.numel())

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.write(extent.name, memory.numel())


def _nvme(plan: Plan, device: Device, drive: Drive | None) -> Tier:
    if drive is None:
        raise ConfigError(
            "states are on nvme, and the bandwidths lack nvme_read or nvme_write: measure them with "
            "infinity bench-links"
        )
    return SimulatedNvme(plan, device, drive)
