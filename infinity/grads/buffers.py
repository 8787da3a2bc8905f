"""Buffers and tiers of gradients, and a gradient in transit between them.

Reads a stored gradient piece by piece, so that adding to it takes no buffer of a whole shard.

Pieces of a gradient shard, in which the host adds, converts or sums it. Pure.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.plan.formats import GradDtypes
from infinity.plan.layout import Part
from infinity.plan.placement import EXTENT_ALIGNMENT, Extent, Placement, State
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier, Window
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer, issued
from infinity.units.unit import Unit
from infinity.update.kernels import NATIVE, SUM_TILE, Kernels


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
        return not self.device.host_addressable and self.tier_of(unit).kind.on_device

    def stored_in_place(self, unit: Unit) -> torch.Tensor | None:
        """Return the unit's stored shard as a view of the tier, (shard_numel,); None if it is not added in place."""
        memory = self.tier_of(unit).memory(self.extent_of(unit))
        if memory is None:
            return None
        dtype = self.dtypes_of(unit).stored
        return memory[: unit.layout.shard_numel * dtype.itemsize].view(dtype)


@dataclass(slots=True)
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

    def await_issue(self, slots: dict[int, set[int]]) -> None:
        """Wait until the reduction is issued, and add the slots of all ranks to those of the unit in `slots`.

        Releases the buffer and raises the error of the reduction, if it could not be issued.
        """
        try:
            self.reduced = issued(self.reduced)
        except BaseException:
            self.release()
            raise
        # Known after the reduction is issued only: other ranks may have added slots.
        slots.setdefault(self.unit.index, set()).update(self.present)

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


Piece = tuple[int, int]
"""Elements [start, stop) of a shard."""


def cut(parts: Sequence[Part], numel: int, most: int) -> tuple[Piece, ...]:
    """Cut a shard of `numel` elements into pieces of at most `most` elements.

    parts: of the shard. most: at least `SUM_TILE`. A part is cut only at multiples of `SUM_TILE` from its start, so
    that its sum of squares, continued from piece to piece, has the same bits as in one pass.
    """
    # Cuts follow the tiles of each part, since a sum continued elsewhere would round differently [Note: the gradient
    # norm].
    starts = [part.start for part in parts] or [0]
    cuts = [0]
    for start, end in zip(starts, [*starts[1:], numel], strict=True):
        while end - cuts[-1] > most:
            cuts.append(start + (cuts[-1] + most - start) // SUM_TILE * SUM_TILE)
    return tuple(zip(cuts, [*cuts[1:], numel], strict=True))


class StoredPieces:
    """The stored part of a shard. Slices of a piece can be read while `along` is at that piece.

    pieces: of the shard, all of them, in ascending order. pool: buffers of a piece with the blocks around it, for a
    tier on a disk, which reads the next pieces while one is added. A memory tier needs none.
    """

    def __init__(self, tier: Tier, extent: Extent, dtype: torch.dtype, pieces: Sequence[Piece], pool: Pool) -> None:
        self.itemsize = dtype.itemsize
        self._tier, self._extent, self._dtype, self._pool = tier, extent, dtype, pool
        self._unread = deque(pieces)
        self._windows: deque[Window] = deque()

    def __getitem__(self, elements: slice) -> torch.Tensor:
        window = self._windows[0]
        first = window.offset // self.itemsize
        return window.tensor.view(self._dtype)[elements.start - first : elements.stop - first]

    def along(self, arriving: Iterable[Piece]) -> Generator[Piece]:
        """Yield each of `pieces` once it and its stored part have arrived. Raises the error of a read."""
        try:
            for piece in arriving:
                self._read_ahead()
                self._windows[0].arrived.wait()
                yield piece
                self._windows.popleft().release()
        finally:
            for window in self._windows:
                with contextlib.suppress(Exception):  # these bytes are not used
                    window.arrived.wait()
                window.release()

    def _read_ahead(self) -> None:
        """Start to read the next pieces: one, and as many more as buffers are free."""
        while self._unread:
            start, nbytes = self._blocks(self._unread[0])
            if self._tier.kind.in_memory:
                window = self._tier.window(self._extent, start, nbytes, self._pool)
                assert window is not None
            else:
                # Waits only for the piece that is needed now; the ones ahead take what is free.
                lease = self._pool.lease(nbytes) if not self._windows else self._pool.try_lease(nbytes)
                if lease is None:
                    return
                with lease:
                    arrives = self._tier.read(self._extent, lease.tensor, start)
                    window = Window(lease.tensor, arrives, self._extent, start, lease.detach())
            self._windows.append(window)
            self._unread.popleft()

    def _blocks(self, piece: Piece) -> tuple[int, int]:
        """Return the first byte and the bytes of the blocks that a piece is in."""
        # A disk is read in whole blocks, and pieces are cut at tiles of the norm.
        start = piece[0] * self.itemsize // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        stop = -(-piece[1] * self.itemsize // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        return start, min(stop, self._extent.nbytes) - start
