"""Collects gradients as they arrive: from `.grad` into the unit's flat gradient, which is reduced over ranks.

Gradients are never all in memory at once: buffers come from a fixed pool. When incomplete gradients fill it, the oldest
is sent on and completed by addition. `TrainingRunner`
(`infinity.engine.training_runner`) says when a gradient is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from infinity.comm.communicator import Communicator
from infinity.errors import ModelError
from infinity.grads.buffers import GradBuffers, Sent
from infinity.grads.held import HeldGradients
from infinity.grads.store import GradStore
from infinity.plan.layout import Slot
from infinity.tiers.pool import Lease, Pool
from infinity.units.unit import Unit

_ZEROED = 16 << 10
"""Size in bytes below which zeroing costs no more than the call itself. A gradient with fewer bytes per gap is zeroed
whole before it is collected."""


@dataclass(slots=True)
class _Open:
    """A unit's gradient that is being collected."""

    lease: Lease
    flat: torch.Tensor
    zeroed: bool
    """True if slots without an arrival are zero already."""
    squares: dict[int, float | None] = field(default_factory=dict)
    """arrived slot → its sum of squares; None if it is computed later."""

    def total(self, slots: Sequence[Slot]) -> float | None:
        """Return the sum of squares over those of `slots` that are in the norm, in order; None if any is missing."""
        total = 0.0
        for slot in sorted(self.squares):
            square = self.squares[slot]
            if square is None:
                return None
            if slots[slot].in_norm:
                total += square
        return total


class GradCollector:
    """Collects the gradients of one step. Called from the thread that runs backward."""

    def __init__(self, ranks: Communicator, places: GradBuffers, store: GradStore) -> None:
        self.places = places
        self._ranks = ranks
        self._store = store
        self._open: dict[int, _Open] = {}
        self._units: dict[int, Unit] = {}
        """index → unit, for units that gradients were collected for."""
        self._held: HeldGradients | None = None
        """Gradients of a micro-batch whose backward runs in pieces."""
        self._sums_at_once = ranks.is_single and places.device.host_addressable
        """True if a gradient's sum of squares is computed on arrival: one rank, device memory that the host reads."""

    # -- arrival -----------------------------------------------------------------------------------------------------

    def holds_back(self, unit: Unit, slot: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient was kept for a later piece of its micro-batch (`infinity.grads.held`)."""
        held = self._held
        return held is not None and held.take(unit.index, slot, gradient, unit.layout.slots[slot].name)

    def collect(self, unit: Unit, slot: int, gradient: torch.Tensor, *, weight: float, last: bool) -> None:
        """Copy a gradient into the unit's flat gradient, or add it.

        weight: factor of the gradient. last: False if another micro-batch of the step is known to follow; it is as of
        `Sent.last`, for incomplete gradients that have to make room.
        """
        index = unit.index
        collecting = self._open.get(index) or self._begin(unit, last)
        # Sparse gradients of embeddings have no place in a flat tensor, and the reduction is dense.
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if weight != 1.0:
            gradient = gradient * weight  # not in place: autograd or a user's hook may hold it
        in_pieces = self._held is not None and index in self._store.units
        if slot in collecting.squares and (in_pieces or self._stores_wider(unit)):
            # Another gradient of the parameter: their sum would round to the dtype collected. In pieces it belongs to
            # another micro-batch, and the sum of the former ones is stored: it takes them in their order.
            self._store.keep(self.send(unit, last=last))
            collecting = self._begin(unit, last)
        # A wider gradient would be rounded here, although the stored sum has the bits for it [Note: only two sums
        # round].
        if gradient.itemsize > collecting.flat.itemsize and self._stores_wider(unit):
            raise ModelError(
                f"the gradient of {unit.layout.slots[slot].name} is {gradient.dtype}, wider than its parameter. Leave "
                "the parameter's grad_dtype as it is."
            )
        squares = collecting.squares
        if slot in squares and self._held is not None:
            # It belongs to another micro-batch. The ordinary order rounds it to the dtype collected before it is added.
            gradient = gradient.to(collecting.flat.dtype)
        squares[slot] = self._put(collecting.flat, unit.layout.slots[slot], gradient, add=slot in squares)
        unit.collected.add(slot)

    def _stores_wider(self, unit: Unit) -> bool:
        """Return whether the unit's gradients are stored in a wider dtype than they are collected in.

        False on several ranks, which sum in the dtype of their reduction, since a send is a collective.
        """
        dtypes = self.places.dtypes_of(unit)
        return self._ranks.is_single and dtypes.collected.itemsize < dtypes.stored.itemsize

    def _put(self, flat: torch.Tensor, place: Slot, gradient: torch.Tensor, *, add: bool) -> float | None:
        """Copy a gradient to its slot, or add it. Returns its sum of squares, from the same pass, if it is final and
        does not make the host wait for the device (`_sums_at_once`); else None.
        """
        if self._sums_at_once:
            places = self.places
            with places.device.recorder.span("reduce", place.name, gradient.nbytes):
                return places.kernels.receive(flat, gradient, add=add, at=place.offset, threads=places.threads)
        # On several ranks or a device, the sum of squares follows after the reduction.
        view = flat[place.offset : place.stop].view(place.shape)
        if add:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        return None

    def _begin(self, unit: Unit, last: bool) -> _Open:
        self._units[unit.index] = unit
        dtype = self.places.dtypes_of(unit).collected
        nbytes = unit.layout.numel * dtype.itemsize
        pool = self.places.pool
        # The choice of an early send depends only on the order of arrivals, since sending is a collective.
        if len(self._open) >= pool.count(nbytes):
            size = pool.size_class(nbytes)
            # Only a buffer of this size helps, and the first of these is the oldest.
            rivals = [i for i, other in self._open.items() if pool.size_class(other.lease.nbytes) == size]
            if len(rivals) == pool.count(nbytes):
                self._store.keep(self.send(self._units[rivals[0]], last=last))
        lease = self._lease(pool, nbytes)
        opened = self._open[unit.index] = _Open(lease, lease.flat(dtype), nbytes <= _ZEROED * len(unit.layout.gaps))
        if opened.zeroed:
            opened.flat.zero_()
        return opened

    def _lease(self, pool: Pool, nbytes: int) -> Lease:
        if (lease := pool.try_lease(nbytes)) is not None:
            return lease
        with self.places.device.recorder.wait("reduce", "gradients"):
            return pool.lease(nbytes)

    # -- departure ---------------------------------------------------------------------------------------------------

    def due(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Remove and yield (unit, slot, gradient) that were held back until the piece of backward that ends."""
        if self._held is not None:
            yield from self._held.due()

    @contextmanager
    def in_pieces(self, held: HeldGradients) -> Iterator[None]:
        """Take each backward in the block as a piece of a micro-batch's backward."""
        self._held = held
        try:
            yield
        finally:
            self._held = None

    @property
    def collecting(self) -> list[int]:
        """The units whose gradients are being collected, in the order in which that began."""
        return list(self._open)

    def send(self, unit: Unit, *, last: bool) -> Sent:
        """Pass a unit's gradient to the reduction over ranks. last: as of `Sent.last`."""
        # The buffer's former content is still in the gaps and in slots without a gradient.
        collecting = self._open.pop(unit.index)
        flat, present = collecting.flat, set(collecting.squares)
        if not collecting.zeroed:
            for start, stop in unit.layout.gaps:
                flat[start:stop].zero_()
            if len(present) < len(unit.layout.slots):
                for slot, place in enumerate(unit.layout.slots):
                    if slot not in present:
                        flat[place.offset : place.stop].zero_()
        lease, flat = self._as_reduced(unit, collecting)
        # Announces the slots with a gradient, so that all ranks update the same ones [Note: gradients on several
        # ranks].
        reduced = self._ranks.reduce(flat, unit.layout, present)
        return Sent(unit, flat, lease, reduced, present, collecting.total(unit.layout.slots), last)

    def _as_reduced(self, unit: Unit, collecting: _Open) -> tuple[Lease, torch.Tensor]:
        """Return the gradient in the `reduced` dtype: itself, or rounded into another buffer."""
        dtype, pool = self.places.dtypes_of(unit).reduced, self.places.reduce_pool
        if collecting.flat.dtype == dtype:
            return collecting.lease, collecting.flat
        assert pool is not None
        # Collected in the accumulation dtype over micro-batches, and rounded once for the collective.
        with collecting.lease, self._lease(pool, unit.layout.numel * dtype.itemsize) as lease:
            flat = lease.flat(dtype, unit.layout.numel)
            flat.copy_(collecting.flat)
            return lease.detach(), flat

    # -- the step ----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Reset the step, after its gradients were passed to the update."""
        self._store.forget()
        self._forget()

    def discard(self) -> None:
        """Drop all gradients collected so far, after a backward that did not end."""
        # Backward was cut short: nothing else refers to the buffers, since a send removes them from here.
        for collecting in self._open.values():
            collecting.lease.release()
        self._open = {}
        self._store.discard()
        self._forget()

    def _forget(self) -> None:
        for unit in self._units.values():
            unit.collected.clear()
