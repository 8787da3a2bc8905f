"""What every tier offers: move an extent's bytes in and out, or open a window on them to work in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from infinity.tiers.placement import Extent
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer


@dataclass
class Window:
    """Bytes of an extent made workable: `tensor` (uint8) is valid once `arrived` is done.

    A memory tier gives a view of itself; a disk tier a leased buffer that `Tier.store` writes back. `release` ends it.
    """

    tensor: torch.Tensor
    arrived: Transfer
    extent: Extent
    offset: int
    lease: Lease | None = None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class Tier(ABC):
    """`device`, `host` or `nvme`. Offsets and lengths in bytes, relative to the extent."""

    name: str
    nbytes: int
    on_device: bool
    """Whether windows of this tier are device memory, so that what works in them runs there."""
    immediate = False
    """True if every transfer is done when it is returned."""

    @abstractmethod
    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        """Fill `destination` (uint8, host or device) from the extent."""

    @abstractmethod
    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        """Write `source` (uint8, host or device) to the extent. `source` must not change until the transfer is done."""

    @abstractmethod
    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        """Start to make bytes [offset, offset + nbytes) workable; None if that needs a buffer and `pool` has none
        free.
        """

    @abstractmethod
    def store(self, window: Window) -> Transfer:
        """Write a changed window back. The window is released by its owner, after the transfer."""

    def register(self, memory: torch.Tensor) -> None:  # noqa: B027 - most tiers gain nothing by it
        """Tell of a buffer (from `memory.host_tensor`) that will be read into and written from again and again."""

    def close(self) -> None:  # noqa: B027 - memory has nothing to give back
        """Give the tier's resources back. Nothing may be in flight."""
