"""Kinds of tiers, and their properties that placement, pools and tiers depend on."""

from __future__ import annotations

from enum import Enum


class TierKind(str, Enum):
    """A kind of tier. A member equals its name, as in reports and files."""

    DEVICE = "device"
    """Memory of the device, which computes in it. On a CPU this is host memory, too."""
    HOST = "host"
    NVME = "nvme"

    # A key of a dict in either form; Enum would hash the member's name.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of_config(cls, device: str) -> TierKind:
        """Return the tier of a key `device` in the config: "none", "cpu" or "nvme"."""
        return _OF_CONFIG[device]

    @property
    def on_device(self) -> bool:
        """True if extents are memory of the device, so that kernels on them run there."""
        return self is TierKind.DEVICE

    @property
    def in_memory(self) -> bool:
        """True if extents are memory: any range is read and written, and windows are views. Otherwise direct I/O moves
        aligned ranges between buffers and files.
        """
        return self is not TierKind.NVME

    @property
    def in_host_memory(self) -> bool:
        """True if extents are memory of the host, which kernels of a device read through copies only."""
        return self.in_memory and not self.on_device


_OF_CONFIG = {"none": TierKind.DEVICE, "cpu": TierKind.HOST, "nvme": TierKind.NVME}
