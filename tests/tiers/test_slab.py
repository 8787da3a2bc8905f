"""A slab of device memory moves to host memory and back with its bytes."""

from __future__ import annotations

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
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


@pytest.mark.parametrize("nbytes", [4 << 20, (4 << 20) + 3], ids=["words", "odd"])
@pytest.mark.parametrize("start", [0, 8, 1])
def test_large_copies_within_host_memory_have_their_bytes(nbytes: int, start: int) -> None:
    """Whole words go past the caches; other bytes do not, wherever they begin."""
    source = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 16, dtype=torch.uint8)
    CpuDevice().copy(target[start : start + nbytes], source[8 : 8 + nbytes]).wait()
    assert torch.equal(target[start : start + nbytes], source[8 : 8 + nbytes])
    assert not target[:start].any() and not target[start + nbytes :].any()
