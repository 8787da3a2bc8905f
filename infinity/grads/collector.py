"""Collects gradients as they arrive: from `.grad` into the unit's flat gradient, which is reduced over ranks.

A unit's gradient is complete when the graph that backward executes has no other one for it, or when backward ends.
Gradients are never all in memory at once: buffers come from a fixed pool. When incomplete gradients fill it, the oldest
is sent on and completed by addition.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from infinity.comm.communicator import Communicator
from infinity.comm.dtensor import local_gradient
from infinity.errors import LifetimeError, ModelError
from infinity.grads.buffers import GradBuffers, Sent
from infinity.grads.held import HeldGradients
from infinity.grads.store import GradStore
from infinity.interrupts import uninterrupted
from infinity.plan.layout import Slot
from infinity.schedule.arrivals import Arrivals
from infinity.tiers.pool import Lease, Pool
from infinity.units.coming import ComingGradients
from infinity.units.compiled import eager
from infinity.units.released import take_grad
from infinity.units.unit import Unit
from infinity.update.job import Gradient

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


class Updates(Protocol):
    """Updates units during backward or later (`infinity.engine.updater`)."""

    def can_update_now(self, unit: Unit) -> bool: ...
    def update_now(self, unit: Unit, gradient: Future[Gradient]) -> None: ...
    def postpone(self, unit: Unit) -> None: ...


class StepState(Protocol):
    """The present step (`infinity.schedule.step`)."""

    @property
    def updated(self) -> Collection[int]: ...
    @property
    def is_last_micro_step(self) -> bool: ...
    @property
    def may_end(self) -> bool: ...
    @property
    def weight(self) -> float: ...
    def add_updated(self, units: Iterable[int]) -> None: ...


class GradCollector:
    """Collects the gradients of one step. Called from the thread that runs backward."""

    def __init__(
        self,
        units: Sequence[Unit],
        ranks: Communicator,
        places: GradBuffers,
        store: GradStore,
        step: StepState,
        updates: Updates,
        coming: ComingGradients,
        on_arrival: Callable[[], None],
        finish_update: Callable[[Unit], None],
    ) -> None:
        """updates: takes the units whose gradients are complete. coming: finds which are. on_arrival: called with each
        gradient. finish_update: executes the update of a former step that no forward has waited for.
        """
        self._units = units
        self._ranks = ranks
        self._places = places
        self._store = store
        self._open: dict[int, _Open] = {}
        self._coming = coming
        self._arrivals = Arrivals()
        self._held: HeldGradients | None = None
        """Gradients of a micro-batch whose backward runs in pieces."""
        self._step = step
        self._sums_at_once = ranks.is_single and places.device.host_addressable
        """True if a gradient's sum of squares is computed on arrival: one rank, device memory that the host reads."""
        self._updates = updates
        self._on_arrival = on_arrival
        self._finish_update = finish_update

    # -- arrival -----------------------------------------------------------------------------------------------------

    def watch(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Install the hooks that empty `.grad` as soon as autograd has filled it."""
        handles = []
        for unit in self._units:
            if unit.layout.trainable:
                for slot, parameter in enumerate(unit.parameters):
                    handles.append(parameter.register_post_accumulate_grad_hook(self._hook(unit, slot)))
        return handles

    def _hook(self, unit: Unit, slot: int) -> Callable[[torch.Tensor], None]:
        # Weak: the garbage collector does not traverse these hooks, so a cycle through them would leak.
        collector, index = weakref.ref(self), unit.index

        @eager
        def arrived(parameter: torch.Tensor) -> None:
            alive = collector()
            if alive is not None:
                gradient = take_grad(parameter)
                if gradient is None:
                    alive.note_cleared()
                else:
                    alive.arrive(alive._units[index], slot, local_gradient(parameter, gradient))

        return arrived

    def note_cleared(self) -> None:
        """Count this backward, although a user's hook has used and cleared its gradient (an optimizer in backward)."""
        self._on_arrival()
        self._arrivals.note_cleared()

    @uninterrupted()
    def arrive(self, unit: Unit, slot: int, gradient: torch.Tensor) -> None:
        self._on_arrival()
        self._places.device.follow_compute()
        held = self._held
        if held is None or not held.take(unit.index, slot, gradient, unit.layout.slots[slot].name):
            self._collect(unit, slot, gradient)
            self._coming.arrived(unit, slot)
            if self._sends and self._ranks.is_single and self._is_complete(unit):
                self._send(unit, complete=True)

    def _is_complete(self, unit: Unit) -> bool:
        return self._arrivals.may_be_complete(unit.index, len(unit.parameters)) and not self._coming.expects(unit)

    def _collect(self, unit: Unit, slot: int, gradient: torch.Tensor) -> None:
        index = unit.index
        if index in self._step.updated:
            raise LifetimeError(
                f"unit {unit.name} received a gradient after its update in the same step, from a backward inside of a "
                "backward that its graph did not show. Load the last checkpoint, and set infinity.update to "
                '"next_forward", which waits for engine.step().'
            )
        if index not in self._arrivals:
            self._finish_update(unit)
        collecting = self._open.get(index) or self._begin(unit)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        weight = self._step.weight
        if weight != 1.0:
            gradient = gradient * weight  # not in place: autograd or a user's hook may hold it
        in_pieces = self._held is not None and index in self._store.units
        if slot in collecting.squares and (in_pieces or self._stores_wider(unit)):
            # Another gradient of the parameter: their sum would round to the dtype collected. In pieces it belongs to
            # another micro-batch, and the sum of the former ones is stored: it takes them in their order.
            self._send(unit, complete=False)
            collecting = self._begin(unit)
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
        self._arrivals.add(index)

    @uninterrupted()
    def unit_changed(self, to: Unit, finished: Callable[[int], bool]) -> None:
        """Handle a change of the unit in use: several ranks send gradients that are complete by then (`Arrivals`).

        finished: unit index → True if backward does not use the unit again.
        """
        if self._ranks.is_single or not self.in_mid_backward:
            return
        for index in self._arrivals.passing(list(self._open), to.index, finished):
            if self._sends:
                self._send(self._units[index], complete=True)

    def _stores_wider(self, unit: Unit) -> bool:
        """Return whether the unit's gradients are stored in a wider dtype than they are collected in.

        False on several ranks, which sum in the dtype of their reduction, since a send is a collective.
        """
        dtypes = self._places.dtypes_of(unit)
        return self._ranks.is_single and dtypes.collected.itemsize < dtypes.stored.itemsize

    @property
    def _sends(self) -> bool:
        """Return whether gradients are reduced in this micro-batch, instead of summed whole until the last one.

        In pieces a unit's next gradients follow at once, so on one rank they are added where they are collected.
        """
        if self._step.is_last_micro_step:
            return True
        return not self._places.whole and (self._held is None or not self._ranks.is_single)

    def _put(self, flat: torch.Tensor, place: Slot, gradient: torch.Tensor, *, add: bool) -> float | None:
        """Copy a gradient to its slot, or add it. Returns its sum of squares, from the same pass, if it is final and
        does not make the host wait for the device (`_sums_at_once`); else None.
        """
        if self._sums_at_once:
            places = self._places
            with places.device.recorder.span("reduce", place.name, gradient.nbytes):
                return places.kernels.receive(flat, gradient, add=add, at=place.offset, threads=places.threads)
        view = flat[place.offset : place.stop].view(place.shape)
        if add:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        return None

    def _begin(self, unit: Unit) -> _Open:
        dtype = self._places.dtypes_of(unit).collected
        nbytes = unit.layout.numel * dtype.itemsize
        pool = self._places.pool
        # The choice of an early send depends only on the order of arrivals, since sending is a collective.
        if len(self._open) >= pool.count(nbytes):
            size = pool.size_class(nbytes)
            rivals = [i for i, other in self._open.items() if pool.size_class(other.lease.nbytes) == size]
            if len(rivals) == pool.count(nbytes):
                self._send(self._units[rivals[0]], complete=False)
        lease = self._lease(pool, nbytes)
        opened = self._open[unit.index] = _Open(lease, lease.flat(dtype), nbytes <= _ZEROED * len(unit.layout.gaps))
        if opened.zeroed:
            opened.flat.zero_()
        return opened

    def _lease(self, pool: Pool, nbytes: int) -> Lease:
        with self._places.device.recorder.wait("reduce", "gradients"):
            return pool.lease(nbytes)

    # -- departure ---------------------------------------------------------------------------------------------------

    @uninterrupted()
    def end_backward(self) -> bool:
        """Send incomplete gradients, and record the number of arrivals that completes each unit. Returns False if no
        gradient arrived.
        """
        self._coming.end_backward(last=self._step.is_last_micro_step)
        if self._held is not None:
            for index, slot, gradient in self._held.due():
                self._collect(self._units[index], slot, gradient)
        if self._arrivals.any and self._sends:
            self.send_all()
        return self._arrivals.end_backward(in_pieces=self._held is not None)

    @contextmanager
    def in_pieces(self, held: HeldGradients) -> Iterator[None]:
        """Take each backward in the block as a piece of a micro-batch's backward."""
        self._held = held
        try:
            yield
        finally:
            self._held = None

    def send_all(self) -> None:
        """Send all gradients still being collected."""
        for index in list(self._open):
            self._send(self._units[index], complete=True)

    @property
    def in_mid_backward(self) -> bool:
        """Return whether gradients have arrived in a backward that has not ended."""
        return self._arrivals.any

    def _send(self, unit: Unit, *, complete: bool) -> None:
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
        reduced = self._ranks.reduce(flat, unit.layout, present)
        squares = collecting.total(unit.layout.slots)
        sent = Sent(unit, flat, lease, reduced, present, squares, self._step.may_end)
        is_last = complete and self._step.is_last_micro_step
        if is_last and self._updates.can_update_now(unit) and not self._coming.expects(unit):
            self._step.add_updated([unit.index])
            self._updates.update_now(unit, self._store.land(sent))
            return
        self._store.keep(sent)
        if is_last:
            self._updates.postpone(unit)

    def _as_reduced(self, unit: Unit, collecting: _Open) -> tuple[Lease, torch.Tensor]:
        """Return the gradient in the `reduced` dtype: itself, or rounded into another buffer."""
        dtype, pool = self._places.dtypes_of(unit).reduced, self._places.reduce_pool
        if collecting.flat.dtype == dtype:
            return collecting.lease, collecting.flat
        assert pool is not None
        with collecting.lease, self._lease(pool, unit.layout.numel * dtype.itemsize) as lease:
            flat = lease.flat(dtype, unit.layout.numel)
            flat.copy_(collecting.flat)
            return lease.detach(), flat

    # -- access ------------------------------------------------------------------------------------------------------

    def is_collecting(self, unit: Unit) -> bool:
        """Return whether gradients of the unit are still being collected."""
        return unit.index in self._open

    def is_updating(self, unit: Unit) -> bool:
        """Return whether the unit's gradient of this step was passed to its update."""
        return unit.index in self._step.updated

    # -- the step ----------------------------------------------------------------------------------------------------

    def take_ready(self) -> list[int]:
        """Return the units with stored gradients, in unit order. These accept no more gradients in this step."""
        units = self._store.take_ready()
        self._step.add_updated(units)
        return units

    def end_step(self) -> None:
        """Reset the step, after its gradients were passed to the update."""
        self._store.forget()
        self._forget_arrivals()

    @uninterrupted()
    def discard(self) -> None:
        """Drop all gradients collected so far, after a backward that did not end."""
        for collecting in self._open.values():
            collecting.lease.release()
        self._open = {}
        self._arrivals.discard()
        self._store.discard()
        self._forget_arrivals()

    def _forget_arrivals(self) -> None:
        self._coming.end_step()
        for unit in self._units:
            unit.collected.clear()
