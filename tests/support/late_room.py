"""Rooms of saved activations with the largest permitted delays (see `support.late_disk`)."""

from __future__ import annotations

import pytest
import torch

from infinity.activations import disk
from infinity.activations.disk import DiskRoom
from infinity.plan.placement import Extent
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import Transfer
from support.late_disk import LateTransfer


class LateRoom(DiskRoom):
    """Reads see the file as of their issue and arrive in a wait; writes happen in a wait."""

    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        then = host_tensor(-(-memory.numel() // 4096) * 4096)
        super()._read(extent, then, offset).wait()
        memory.fill_(0xFF)

        def arrive() -> None:
            memory.copy_(then[: memory.numel()])

        return LateTransfer(arrive)

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        def write() -> None:
            super(LateRoom, self)._write(extent, memory, offset).wait()

        return LateTransfer(write)


class HeldRoom(DiskRoom):
    """Whole transfers, staging included, happen in the first wait for them."""

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        destination.fill_(0xFF)
        return LateTransfer(lambda: super(HeldRoom, self).read(extent, destination).wait())

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        return LateTransfer(lambda: super(HeldRoom, self).write(extent, source).wait())


def use_late_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give engines made in this test late rooms."""
    monkeypatch.setattr(disk, "DiskRoom", LateRoom)
