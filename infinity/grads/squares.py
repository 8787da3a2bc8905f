"""Sums of squares of gradients on the device, which the host reads when it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinity import concurrency
from infinity.plan.layout import Part
from infinity.sizes import sum_in_order
from infinity.tiers.device import Device
from infinity.tiers.transfer import Transfer
from infinity.update.job import Squares
from infinity.update.kernels import Kernels


class DeviceSquares:
    """One unit's sums of squares: an fp64 number for each part on the device, all copied to host memory at once.

    Called from one thread.
    """

    def __init__(self, device: Device, parts: Sequence[Part], kernels: Kernels) -> None:
        """parts: of the unit's shard; those in the norm are summed."""
        self._device = device
        self._kernels = kernels
        self._parts = [part for part in parts if part.in_norm]
        self._ranges = [(part.start, part.stop) for part in self._parts]
        self._host: torch.Tensor | None = None
        self._latest: _Copied | None = None

    def start(self, shard: torch.Tensor) -> Squares:
        """Start to sum a gradient after the compute issued so far by this thread."""
        if not self._parts:  # as on a rank whose shard of a small unit is padding
            return Squares(0.0)
        self.close()  # reads an earlier gradient's sums, before they are overwritten
        if self._host is None:
            self._host = self._device.host_buffer(len(self._parts) * torch.float64.itemsize)
        # `_Copied` refers to it until it is copied, since its memory must not be used again before.
        sums = torch.empty(len(self._parts), dtype=torch.float64, device=shard.device)
        self._kernels.squares_into(sums, shard, self._ranges)
        summed = self._device.compute_reached()
        copy = self._device.copy_result(self._host, sums.view(torch.uint8))
        self._latest = _Copied(None, summed, copy, sums, self._host, self._parts, self._device)
        return self._latest

    def close(self) -> None:
        """Wait for the last copy."""
        if self._latest is not None:
            self._latest.total()


@dataclass(eq=False)
class _Copied(Squares):
    """The sums of one gradient, which are copied to the host, and their total once it is read."""

    summed: Transfer
    copy: Transfer
    sums: torch.Tensor | None
    """Alive while it is copied."""
    host: torch.Tensor
    parts: Sequence[Part]
    device: Device
    reading: concurrency.Lock = field(default_factory=concurrency.lock)

    def total(self) -> float:
        recorder = self.device.recorder
        if self.known is None and self.reading.locked():  # another thread reads it, and waits for the device
            with recorder.wait("reduce", "norm"), self.reading:
                pass
        with self.reading:
            if self.known is None:
                with recorder.wait("reduce", "norm"):
                    self.summed.wait()
                with recorder.wait("device_to_host", "small copies"):
                    self.copy.wait()
                self.sums = None
                sums = self.device.numbers(self.host.view(torch.float64))
                # Replicated parameters are divided, so that each counts once in the sum over ranks.
                self.known = sum_in_order(sums[k] / part.copies for k, part in enumerate(self.parts))
        return self.known
