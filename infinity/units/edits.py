"""Finds edits of parameters in a unit's buffer, by fingerprints of it."""

from __future__ import annotations

from functools import cached_property

import torch

from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import DONE, Transfer
from infinity.units.unit import Unit


class EditCheck:
    """One comparison. Calling it waits for the device, and returns whether the unit was edited. Any thread may."""

    def __init__(
        self, device: Device, same: torch.Tensor, flag: torch.Tensor, computed: Transfer, copied: Transfer
    ) -> None:
        """same: valid once `computed` is done. flag: its copy on the host, valid once `copied` is done."""
        self._computed = computed
        self.copied = copied
        self.same: torch.Tensor | None = same  # alive while it is copied
        self._device = device
        self._flag = flag

    def __call__(self) -> bool:
        # Two waits with two reasons: compute that was ahead of the check, then the copy of its result.
        recorder = self._device.recorder
        with recorder.wait("compute", "edits"):
            self._computed.wait()
        with recorder.wait("device_to_host", "small copies"):
            self.copied.wait()
        self.same = None
        return not self._device.numbers(self._flag)[0]


class EditChecks:
    """Compares buffers with fingerprints on the device. The host reads a result when it needs it."""

    def __init__(self, device: Device, units: int) -> None:
        """units: number of units; at most one check of each is under way."""
        self._device = device
        self._units = units

    @cached_property
    def _flags(self) -> torch.Tensor:
        device = self._device
        return host_tensor(self._units) if device.host_addressable else device.host_buffer(self._units)

    def start(self, unit: Unit) -> EditCheck:
        """Start to compare a resident unit's buffer, which nothing changes any more, with the unit's fingerprint."""
        assert unit.lease is not None
        flag = self._flags[unit.index : unit.index + 1]
        # Compared on the device: only one byte comes back, and the model's thread need not wait for it [Note: who
        # waits for a fingerprint].
        same = self._device.fingerprint(unit.lease.tensor) == unit.fingerprint
        if not isinstance(same, torch.Tensor):
            flag[0] = same
            return EditCheck(self._device, flag, flag, DONE, DONE)
        result = same.reshape(1).view(torch.uint8)
        computed = self._device.compute_reached()
        return EditCheck(self._device, result, flag, computed, self._device.copy_result(flag, result))
