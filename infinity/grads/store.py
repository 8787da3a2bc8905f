"""Passes reduced gradients to the update at once, or to their tier, where later gradients of the step are added.

Runs on a thread of its own, in order of submission, so that backward does not wait for reductions or disks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from infinity.comm.communicator import Communicator
from infinity.plan.grad_dtypes import GradDtypes
from infinity.plan.placement import Placement, State
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer, issued
from infinity.units.unit import Unit
from infinity.update.job import INLINE, Gradient
from infinity.update.kernels import receive, squared_norm


@dataclass
class GradBuffers:
    """Tier of gradients, and the buffers on the way."""

    device: Device
    tier: Tier
    placement: Placement
    dtypes: Callable[[torch.dtype], GradDtypes]
    """Dtype of parameters → dtypes of their gradients."""
    pool: Pool
    """Buffers of whole units, in the `collected` dtype."""
    reduce_pool: Pool | None
    """Buffers of whole units, in the `reduced` dtype; None if it is the same."""
    host_pool: Pool | None
    """Host buffers for reduced shards; None if the host works in the device's buffers."""
    stored_pool: Pool
    """Buffers for stored shards that gradients are added to."""
    whole: bool
    """True if gradients are summed over micro-batches before they are reduced, each in its own buffer of `pool`."""
    threads: int
    """Threads of a pass over a gradient in host memory; 0: one per processor."""

    def dtypes_of(self, unit: Unit) -> GradDtypes:
        return self.dtypes(unit.layout.dtype)


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

    def move(self, lease: Lease, flat: torch.Tensor) -> None:
        """Release the present buffer; continue in `flat`, a view of `lease`."""
        self.lease.release()
        self.lease, self.flat = lease, flat


_Result = TypeVar("_Result")


def _carried_out(work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Run `work` in the calling thread and return a finished future with its result or exception."""
    future: Future[_Result] = Future()
    try:
        future.set_result(work(*arguments))
    except Exception as error:  # noqa: BLE001 - raised by the waiter
        future.set_exception(error)
    return future


def _squares_of(gradient: Future[Gradient]) -> float:
    """Return the gradient's sum of squares; NaN if it did not land, since the update raises that error."""
    return math.nan if gradient.exception() is not None else gradient.result().squares


class GradStore:
    """Stores the reduced gradients of one step."""

    def __init__(self, ranks: Communicator, places: GradBuffers) -> None:
        self.units: set[int] = set()
        """Units whose gradient, or part of it, is stored in its tier for the update."""
        self.slots: dict[int, set[int]] = {}
        """unit → slots that received a gradient in this step, on any rank; complete once the gradient has landed."""
        self._ranks = ranks
        self._places = places
        self._squares: dict[int, Future[float]] = {}
        """unit → sum of squares of its stored gradient."""
        self._landed: dict[int, Future[Gradient]] = {}
        """unit → gradient that was passed to the update."""
        self._moves: list[Future[None]] = []
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="infinity-grads", initializer=places.device.enter_thread)

    def land(self, sent: Sent) -> Future[Gradient]:
        """Return the gradient plus the stored part, in memory that the update can work in."""
        add = sent.unit.index in self.units
        self.units.discard(sent.unit.index)
        if self._is_small(sent) and (not add or self._places.tier.immediate):
            landed = _carried_out(self._land, sent, self.slots, add)
        else:
            landed = self._mover.submit(self._land, sent, self.slots, add)
        self._landed[sent.unit.index] = landed
        return landed

    def keep(self, sent: Sent) -> None:
        """Store a gradient, or add it to the stored one."""
        index = sent.unit.index
        add = index in self.units
        self.units.add(index)
        squares: Future[float] = Future()
        self._squares[index] = squares
        if self._is_small(sent) and self._places.tier.immediate:
            self._moves.append(_carried_out(self._keep, sent, self.slots, add, squares))
        else:
            self._moves.append(self._mover.submit(self._keep, sent, self.slots, add, squares))

    def _is_small(self, sent: Sent) -> bool:
        """True if the move is faster than waking the thread and can only wait for the tier.

        The result is the same for all gradients of a unit, which keeps them in order.
        """
        places = self._places
        return sent.unit.layout.shard_numel <= INLINE and self._ranks.is_single and places.device.host_addressable

    # -- the thread --------------------------------------------------------------------------------------------------

    def _land(self, sent: Sent, slots: dict[int, set[int]], add: bool) -> Gradient:
        """Return the reduced shard plus the stored part, in memory that the update works in.

        slots: `self.slots` of the gradient's step, which may have ended since.
        """
        try:
            sent.reduced = issued(sent.reduced)
            slots.setdefault(sent.unit.index, set()).update(sent.present)
            sent.flat = self._ranks.shard(sent.flat)
            self._reach_host(sent)
            squares = self._sum_up(sent, add)
            return Gradient(sent.flat, sent.lease, squares, self._places.device.compute_reached())
        except BaseException:
            sent.lease.release()
            raise
        finally:
            del sent.flat

    def _reach_host(self, sent: Sent) -> None:
        """Copy the shard to a host buffer if the update works on the host."""
        places, shard = self._places, sent.flat
        if places.host_pool is None:
            places.device.await_copy(sent.reduced)
            return
        with places.host_pool.lease(shard.numel() * shard.element_size()) as host:
            places.device.copy(host.tensor, shard.view(torch.uint8), after=sent.reduced).wait()
            sent.move(host.detach(), host.flat(shard.dtype))

    def _sum_up(self, sent: Sent, add: bool) -> float:
        """Convert the shard to the stored dtype and, with `add`, add the stored shard. Returns the sum of squares."""
        places, unit, shard = self._places, sent.unit, sent.flat
        dtype = places.dtypes_of(unit).stored
        if not add and dtype == shard.dtype:
            if sent.squares is not None:
                return sent.squares
            return squared_norm(shard, unit.layout.parts(self._ranks.shard_rank), places.threads)
        with places.stored_pool.lease(shard.numel() * dtype.itemsize) as lease:
            if add:
                places.tier.read(places.placement.of(unit.index, State.GRAD), lease.tensor).wait()
            if dtype == shard.dtype:
                return self._receive(unit, shard, lease.flat(dtype), add=True)
            squares = self._receive(unit, lease.flat(dtype), shard, add=add)
            sent.move(lease.detach(), lease.flat(dtype))
            return squares

    def _receive(self, unit: Unit, target: torch.Tensor, source: torch.Tensor, *, add: bool) -> float:
        """Copy a shard to `target`, or add it, in any dtypes. Zeroes padding. Returns the norm's part of the sum."""
        squares, end = 0.0, 0
        for part in unit.layout.parts(self._ranks.shard_rank):
            target[end : part.start].zero_()
            place, end = slice(part.start, part.stop), part.stop
            received = receive(target[place], source[place], add=add, threads=self._places.threads)
            squares += received / part.copies if part.in_norm else 0.0
        target[end:].zero_()
        return squares

    def _keep(self, sent: Sent, slots: dict[int, set[int]], add: bool, squares: Future[float]) -> None:
        try:
            gradient = self._land(sent, slots, add)
            try:
                squares.set_result(gradient.squares)
                extent = self._places.placement.of(sent.unit.index, State.GRAD)
                self._places.tier.write(extent, gradient.shard.view(torch.uint8)).wait()
            finally:
                gradient.release()
        except BaseException as error:
            if not squares.done():
                squares.set_exception(error)
            raise

    # -- access ------------------------------------------------------------------------------------------------------

    def read(self, unit: Unit) -> torch.Tensor:
        """Return a unit's stored gradient, summed over ranks, whole on every rank: (numel,) in host memory."""
        self.settle()
        places = self._places
        dtype = places.dtypes_of(unit).stored
        flat = host_tensor(unit.layout.numel * dtype.itemsize)
        places.tier.read(places.placement.of(unit.index, State.GRAD), self._ranks.shard(flat)).wait()
        self._ranks.complete(flat)
        return flat.view(dtype)

    def write(self, unit: Unit, flat: torch.Tensor) -> None:
        """Replace a unit's stored gradient. flat: as returned by `read`."""
        shard = self._ranks.shard(flat)
        aligned = host_tensor(shard.numel() * shard.element_size())
        aligned.copy_(shard.view(torch.uint8))
        self._places.tier.write(self._places.placement.of(unit.index, State.GRAD), aligned).wait()
        squares: Future[float] = Future()
        squares.set_result(squared_norm(shard, unit.layout.parts(self._ranks.shard_rank)))
        self._squares[unit.index] = squares

    # -- the step ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient has landed. Raises the error of one that failed."""
        moves, self._moves = self._moves, []
        for move in moves:
            move.result()

    def squared_norms(self) -> tuple[float, ...]:
        """Return the sums of squares over all ranks of the stored gradients, and of all gradients of the step.

        Units are added in their order. Waits for the gradients.
        """
        stored = sum(self._squares[index].result() for index in sorted(self.units))
        return self._ranks.sum_over_shards(stored, self.step_squares()() if self._landed else stored)

    def step_squares(self) -> Callable[[], float]:
        """Return a function that waits for all gradients of the step and returns their sum of squares on this rank, in
        unit order. It may be called after the step.
        """
        # The end of a step replaces these collections and does not change them.
        stored, squares, landed = self.units, self._squares, self._landed

        def total() -> float:
            units = sorted({*stored, *landed})
            return sum(squares[i].result() if i in stored else _squares_of(landed[i]) for i in units)

        return total

    def take_ready(self) -> list[int]:
        """Return the units with stored gradients, in unit order, and pass the gradients on to the update."""
        units, self.units = sorted(self.units), set()
        return units

    def forget(self) -> None:
        """Reset the step, after its gradients were dropped or passed to the update. Moves under way continue."""
        self._places.tier.trim()
        self.units = set()
        self.slots = {}
        self._squares = {}
        self._landed = {}

    def discard(self) -> None:
        """Drop all gradients and ignore errors of their moves."""
        for move in self._moves:
            move.exception()
        self._moves = []
        for index in self.units:
            self._places.tier.discard(self._places.placement.of(index, State.GRAD))
        self.forget()

    def close(self) -> None:
        self._mover.shutdown()
