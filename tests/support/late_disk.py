"""An nvme tier for tests with the largest permitted delays.

Reads see the file as of their issue, and fill their destination, NaN until then, only in a wait. Writes happen in a
wait.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers import open_tiers
from infinity.tiers.base import Tier, Window
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool
from infinity.tiers.transfer import Transfer


class LateTransfer:
    """Carried out by the first wait."""

    def __init__(self, carry_out: Callable[[], None]) -> None:
        self._carry_out: Callable[[], None] | None = carry_out

    def wait(self) -> None:
        carry_out, self._carry_out = self._carry_out, None
        if carry_out is not None:
            carry_out()

    def done(self) -> bool:
        return self._carry_out is None


class LateNvmeTier(NvmeTier):
    def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        then = host_tensor(memory.numel())
        super()._read(extent, then, offset).wait()
        memory.fill_(0xFF)

        def arrive() -> None:
            memory.copy_(then)

        return LateTransfer(arrive)

    def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
        def write() -> None:
            super(LateNvmeTier, self)._write(extent, memory, offset).wait()

        return LateTransfer(write)


class LateSlab(Tier):
    """A tier in memory with the same delays, for tests of parts without an engine."""

    kind = TierKind.NVME

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.slab = torch.zeros(nbytes, dtype=torch.uint8)
        self.failing: set[tuple[str, int]] = set()
        """Transfers that fail once, as ("read" or "write", byte offset in the tier)."""

    def _strikes(self, kind: str, start: int) -> bool:
        strikes = (kind, start) in self.failing
        self.failing.discard((kind, start))
        return strikes

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        start = extent.offset + offset
        then = self.slab[start : start + destination.numel()].clone()
        destination.fill_(0xFF)

        def arrive() -> None:
            if self._strikes("read", start):
                raise OSError(5, f"Input/output error: {destination.numel()} bytes at {start}", "swap")
            destination.copy_(then)

        return LateTransfer(arrive)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        start = extent.offset + offset

        def write() -> None:
            if self._strikes("write", start):
                raise OSError(28, f"No space left on device: {source.numel()} bytes at {start}", "swap")
            self.slab[start : start + source.numel()] = source

        return LateTransfer(write)

    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        lease = pool.try_lease(nbytes)
        if lease is None:
            return None
        return Window(lease.tensor, self.read(extent, lease.tensor, offset), extent, offset, lease)

    def store(self, window: Window) -> Transfer:
        return self.write(window.extent, window.tensor, window.offset)


def use_late_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give engines made in this test late disks."""
    monkeypatch.setattr(open_tiers, "NvmeTier", LateNvmeTier)
