"""Buffers and tiers of gradients, and a gradient in transit between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity.plan.formats import GradDtypes
from infinity.plan.placement import Extent, Placement, State
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer, issued
from infinity.units.unit import Unit
from infinity.update.kernels import NATIVE, Kernels


@dataclass
class GradBuffers:
    """Tiers of gradients, and the buffers on the way."""

    device: Device
    tiers: Mapping[TierKind, Tier]
    """Tiers of stored gradients, by name."""
    placement: Placement
    dtypes: Callable[[torch.dtype], GradDtypes]
    """Dtype of parameters → dtypes of their gradients."""
    pool: Pool
    """Buffers of whole units, in the `collected` dtype."""
    reduce_pool: Pool | None
    """Buffers of whole units, in the `reduced` dtype; None if it is the same."""
    host_pool: Pool | None
    """Host buffers for reduced shards; None if the update works where they are reduced."""
    stored_pool: Pool | None
    """Buffers for stored shards that gradients are added to; None if they are added in place."""
    whole: bool
    """True if gradients are summed over micro-batches before they are reduced, each in its own buffer of `pool`."""
    threads: int
    """Threads of a pass over a gradient in host memory; 0: one per processor."""
    kernels: Kernels = NATIVE

    def dtypes_of(self, unit: Unit) -> GradDtypes:
        return self.dtypes(unit.layout.dtype)

    def extent_of(self, unit: Unit) -> Extent:
        return self.placement.of(unit.index, State.GRAD)

    def tier_of(self, unit: Unit) -> Tier:
        return self.tiers[self.extent_of(unit).tier]

    def on_device(self, unit: Unit) -> bool:
        """Return whether the unit's gradient is stored and updated in a memory of the device's own."""
        return self.tier_of(unit).kind.on_device and not self.device.host_addressable

    def stored_in_place(self, unit: Unit) -> torch.Tensor | None:
        """Return the unit's stored shard as a view of the tier, (shard_numel,); None if it is not added in place."""
        memory = self.tier_of(unit).memory(self.extent_of(unit))
        if memory is None:
            return None
        dtype = self.dtypes_of(unit).stored
        return memory[: unit.layout.shard_numel * dtype.itemsize].view(dtype)


@dataclass
class Sent:
    """A unit's gradient in transit, in a leased buffer: (numel,) until it is reduced, then this rank's shard."""

    unit: Unit
    flat: torch.Tensor
    lease: Lease
    reduced: Transfer
    """Done when it is reduced, after the compute that produced it."""
    present: set[int]
    """Slots with a gradient; after the reduction, on any rank."""
    squares: float | None
    """Sum of squares if it is known, else None."""
    last: bool = True
    """False if another micro-batch of the step is known to follow."""

    def release(self) -> None:
        """Release the buffer. Nothing may use it."""
        self.lease.release()
        del self.flat

    def drop(self) -> None:
        """Wait for the reduction, ignore its error, and release the buffer."""
        with contextlib.suppress(Exception):
            self.reduced.wait()
        self.release()

    def await_issue(self) -> None:
        """Wait until the reduction is issued, and raise its error. `present` holds the slots of all ranks then."""
        self.reduced = issued(self.reduced)

    def keep_shard(self, shard: torch.Tensor) -> None:
        """Keep this rank's shard, of the gradient that was reduced."""
        self.flat = shard

    def forget(self) -> None:
        """Refer to the gradient no more. Something else has its lease."""
        del self.flat

    def move(self, lease: Lease, flat: torch.Tensor) -> None:
        """Release the present buffer; continue in `flat`, a view of `lease`."""
        self.lease.release()
        self.lease, self.flat = lease, flat
