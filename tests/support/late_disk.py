"""An nvme tier for tests that is as late as a disk may be.

Reads see the file as it is when they are issued, and fill their destination, until then NaN, only when waited for;
writes happen when waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity import assembly
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.placement import Extent
from infinity.tiers.transfer import Transfer


class LateTransfer:
    """Carried out by the first to wait for it."""

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


def use_late_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made in this test have late disks."""
    monkeypatch.setattr(assembly, "NvmeTier", LateNvmeTier)
