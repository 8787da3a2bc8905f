"""A slab of device memory moves to host memory and back with its bytes."""

from __future__ import annotations

import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.slab import SlabTier
from support.late_device import LateDevice

EXTENT = Extent(TierKind.DEVICE, 4096, 4096, "states")


def test_bytes_have_moved_when_a_move_returns() -> None:
    """A copy that nobody waits for happens long after the test."""
    device = LateDevice(delay=1000.0)
    tier = SlabTier(TierKind.DEVICE, 8192, device)
    tier.write(EXTENT, torch.arange(4096).to(torch.uint8)).wait()
    for move, on_host in ((tier.offload, True), (tier.reload, False)):
        move()
        memory = tier.memory(EXTENT)
        assert device.is_host(memory) == on_host
        assert torch.equal(memory, torch.arange(4096).to(torch.uint8))
