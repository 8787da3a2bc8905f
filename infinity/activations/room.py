"""Interface of the memory that saved tensors go to."""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.transfer import Transfer


class Room(Protocol):
    """Memory of a slower tier, which grows as it is needed. Called by one thread at a time."""

    kind: TierKind
    """Host or nvme."""
    staging_nbytes: int
    """Bytes of host buffers of its own, counted by the plan."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved at present."""

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def blocks_repaired(self) -> int:
        """Blocks that did not match their checksum when they were read, and did in a second read."""

    def reserve(self, nbytes: int) -> Extent:
        """Return room for `nbytes`. Raises OutOfSpaceError or OutOfMemoryError."""

    def free(self, extent: Extent) -> None:
        """Return the room of an extent, which no transfer uses."""

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Write `source`, uint8 (extent.nbytes,), after the compute that this thread issued so far.

        `source` must neither change nor be freed until the transfer is done.
        """

    def read(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        """Fill `destination`, uint8 (extent.nbytes,), after the compute that this thread issued so far."""

    def close(self) -> None:
        """Release everything. No transfer may be under way."""
