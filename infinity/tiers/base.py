"""Interface of tiers: transfers of an extent's bytes, and windows to work on them in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infinity.plan.placement import Extent
from infinity.tier_kind import TierKind
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer


@dataclass(slots=True)
class Window:
    """Bytes of an extent to work on: `tensor` (uint8) is valid once `arrived` is done.

    A view of the tier on memory tiers; on disk tiers a leased buffer, which `Tier.store` writes back. `release` returns
    the lease.

    before: in a draft on memory tiers, the present bytes, and `tensor` is what they become; else None: `tensor` has
    them.
    """

    tensor: torch.Tensor
    arrived: Transfer
    extent: Extent
    offset: int
    lease: Lease | None = None
    before: torch.Tensor | None = None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class Tier(ABC):
    """Tier `device`, `host` or `nvme`. Offsets and lengths are in bytes; offsets are relative to the extent."""

    kind: TierKind
    nbytes: int
    staging_nbytes = 0
    """Bytes of host buffers of the tier's own, through which it exchanges data with the device."""
    immediate = False
    """True if every transfer is done when it is returned."""

    @abstractmethod
    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        """Fill `destination` (uint8, host or device) from the extent."""

    def fetch(self, extent: Extent, destination: torch.Tensor) -> Transfer:
        """Fill a unit's buffer, `destination` (uint8), from a whole extent of parameters, and decode a code. Memory of
        the host returns `Fingerprinted`.
        """
        return self.read(extent, destination)

    @abstractmethod
    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        """Write `source` (uint8, host or device) to the extent. `source` must not change until the transfer is done."""

    @abstractmethod
    def window(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> Window | None:
        """Open a window on bytes [offset, offset + nbytes); None if it needs a buffer and `pool` has none free."""

    def window_ahead(self, extent: Extent, offset: int, nbytes: int, pool: Pool) -> bool:
        """Start to read a window that a later call of `window` returns. Returns False if `pool` has no buffer free.

        Its buffer is free to other windows that need one, and a write drops it. No write of its bytes may be under way.
        Does not wait.
        """
        return True  # memory has nothing to read

    def drop_windows_ahead(self) -> None:  # noqa: B027 - memory has none
        """Release the buffers of windows that were opened ahead and not taken. Waits for their reads."""

    @abstractmethod
    def store(self, window: Window) -> Transfer:
        """Write a changed window back. Its owner releases the window after the transfer."""

    def begin_draft(self, extent: Extent) -> bool:
        """Keep the present bytes of an extent while it is overwritten: until `end_draft`, reads return them, and
        writes, `store` and `memory` go to a spare slot. Returns False if the extent has none that is free.

        No write of the extent may be under way.
        """
        return False

    def end_draft(self, extent: Extent, *, keep: bool) -> None:
        """End a draft once its writes have ended. keep: all bytes were written, and are the present ones from now on;
        else those of before stay.
        """
        raise NotImplementedError

    reads_ahead = False
    """True if `read_ahead` begins reads."""

    def read_ahead(self, extents: Iterable[Extent]) -> None:  # noqa: B027 - memory is read at once
        """Start reading `extents` into buffers of the tier's own, in this order, as far as these suffice.

        A later `read` of a whole extent uses them. Buffers of other extents are reused. No write of the extents may be
        under way. Does not wait. Takes no more of `extents` than it needs to decide.
        """

    def reserve(self, extent: Extent) -> None:  # noqa: B027 - space stays reserved
        """Reserve the space of an extent that will be written. Raises OutOfSpaceError if there is too little."""

    def discard(self, extent: Extent, read: torch.Tensor | None = None) -> None:  # noqa: B027 - space stays reserved
        """Allow `trim` to release the extent's memory until it is written again. No-op on tiers that reserve it.

        read: a window's tensor; if the extent has been written again since, its bytes stay.
        """

    def trim(self) -> None:  # noqa: B027 - space stays reserved
        """Release the memory of extents that were discarded before the last call and not written since."""

    def memory(self, extent: Extent) -> torch.Tensor | None:
        """Return the bytes of an extent, uint8 (nbytes,), to work on in place; None on tiers without reserved
        memory. In a draft, they are those of the spare slot, and `before` has the present ones.
        """
        return None

    def before(self, extent: Extent) -> torch.Tensor | None:
        """Return the present bytes of an extent in a draft, uint8 (nbytes,); None if `memory` has them."""
        return None

    def register(self, memory: torch.Tensor) -> None:  # noqa: B027 - most tiers gain nothing by it
        """Register a buffer (from `memory.host_tensor`) that transfers will use repeatedly."""

    def close(self) -> None:  # noqa: B027 - memory has nothing to release
        """Release the tier's resources. No transfer may be in flight."""

    def free_memory(self) -> None:  # noqa: B027 - `close` does it on other tiers
        """Free the memory of all extents, whatever refers to the tier. They cannot be used from then on."""
