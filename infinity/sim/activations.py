"""Rooms of saved activations without bytes, whose transfers take time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infinity.activations.disk import NAME, DiskRoom
from infinity.activations.room import HostRoom, Room
from infinity.plan.io import ActivationPlan, IoPlan
from infinity.plan.placement import Extent, aligned
from infinity.sim.clock import Clock
from infinity.sim.lanes import Drive, DriveEngine, measured
from infinity.tiers.device import Device
from infinity.tiers.files import alignment, whole
from infinity.tiers.transfer import Transfer

_LANE = "activations"
_Count = Callable[[torch.Tensor], None]
"""Counts memory into which a saved storage is read back."""


class SimulatedRoom(Room, Protocol):
    peak: int
    """The most bytes of storages at once; on nvme as aligned in files."""


def open_simulated_room(
    plan: ActivationPlan, device: Device, clock: Clock, drive: Drive | None, count: _Count
) -> SimulatedRoom:
    if plan.io is None:
        return SimulatedHostRoom(device, clock, count)
    return SimulatedDiskRoom(plan.io, measured(drive, "infinity.activations"), device, count)


class SimulatedHostRoom(HostRoom):
    """The engine's room in host memory, whose copies are in the lane of saved activations."""

    def __init__(self, device: Device, clock: Clock, count: _Count) -> None:
        super().__init__(device)
        self.peak = 0
        self._clock = clock
        self._count = count

    def reserve(self, nbytes: int) -> Extent:
        extent = super().reserve(nbytes)
        self.peak = max(self.peak, self.nbytes)
        return extent

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        with self._clock.naming(extent.name, _LANE):
            return super().write(extent, source)

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        self._count(destination)
        with self._clock.naming(extent.name, _LANE):
            return super().read(extent, destination)


class SimulatedDiskRoom(DiskRoom):
    """The engine's room on nvme over a simulated drive."""

    def __init__(self, io: IoPlan, drive: Drive, device: Device, count: _Count) -> None:
        self._requests = DriveEngine(drive, _LANE)
        parts: Any = self._requests  # in place of the native engine
        super().__init__(io, parts, device, 0)
        self._count = count
        self.peak = self._held = 0

    @property
    def blocks_repaired(self) -> int:
        return 0

    def reserve(self, nbytes: int) -> Extent:
        self._held += aligned(nbytes)
        self.peak = max(self.peak, self._held)
        return super().reserve(nbytes)

    def free(self, extent: Extent) -> None:
        self._held -= aligned(extent.nbytes)
        super().free(extent)

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        self._count(destination)
        return super().read(extent, destination)

    def _open(self, nbytes: int) -> Any:
        return _File(nbytes)

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.read(f"read {NAME}", whole(memory.numel(), alignment()))

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        return self._requests.write(f"write {NAME}", whole(memory.numel(), alignment()))


@dataclass(frozen=True)
class _File:
    """A file without bytes."""

    nbytes: int

    def close(self) -> None:
        """Nothing is open."""
