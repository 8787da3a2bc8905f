"""The engine's device on "late", with host buffers that count as pinned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import late
from infinity.tiers.accelerator import AcceleratorDevice
from infinity.tiers.memory import before_unmapping, host_tensor


class LateAccelerator(AcceleratorDevice):
    """Device "late"."""

    def __init__(self, index: int = 0) -> None:
        late.load()
        super().__init__(torch.device("late", index))

    def host_buffer(self, nbytes: int, *, pin: bool = True) -> torch.Tensor:
        buffer = host_tensor(nbytes)
        if pin and nbytes > 0:
            self.pin(buffer, [(0, nbytes)])
        return buffer

    def pin(self, memory: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            address = memory.data_ptr() + start
            late.pin(address, stop - start)
            before_unmapping(memory, partial(late.unpin, address))
