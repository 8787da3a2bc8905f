"""Where reduced gradients go: to the update at once, or to their tier, where what comes later in the step is added.

On a thread of its own, in the order in which they were sent, so that backward does not wait for reductions or disks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from infinity.comm.collectives import Ranks
from infinity.optim.grad_dtypes import GradDtypes
from infinity.optim.job import INLINE, Gradient
from infinity.optim.kernels import receive, squared_norm
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.placement import Placement, State
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer
from infinity.units.unit import Unit


@dataclass
class GradPlaces:
    """Where gradients go, and the buffers on the way."""

    device: Device
    tier: Tier
    placement: Placement
    dtypes: Callable[[torch.dtype], GradDtypes]
    """Of the gradients of parameters of a dtype."""
    pool: Pool
    """Whole units, as they are collected."""
    reduce_pool: Pool | None
    """Whole units as they are reduced; None where that is how they are collected."""
    host_pool: Pool | None
    """Host buffers for reduced shards; None where the host works in the device's buffers."""
    stored_pool: Pool
    """For shards that were stored before and are added to."""
    whole: bool
    """Gradients are summed over micro-batches before they are reduced, each in a buffer of `pool` of its own."""
    threads: int
    """Of a pass over a gradient in host memory; 0: one per processor."""

    def dtypes_of(self, unit: Unit) -> GradDtypes:
        return self.dtypes(unit.layout.dtype)


@dataclass
class Sent:
    """A unit's gradient on its way, in a leased buffer: (numel,) until it is reduced, this rank's shard after that."""

    unit: Unit
    flat: torch.Tensor
    lease: Lease
    reduced: Transfer
    reached: Transfer
    """Done when the compute that made it has ended."""
    present: set[int]
    """Slots with a gradient, on any rank once it is reduced."""
    squares: float | None
    """Their sum of squares, where it is known; it is not if something is still added."""

    def move(self, lease: Lease, flat: torch.Tensor) -> None:
        """It is in another buffer now."""
        self.lease.release()
        self.lease, self.flat = lease, flat


_Result = TypeVar("_Result")


def _carried_out(work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Run `work` in the calling thread and return a finished future with its result or exception."""
    future: Future[_Result] = Future()
    try:
        future.set_result(work(*arguments))
    except Exception as error:  # noqa: BLE001 - raised by whoever waits
        future.set_exception(error)
    return future


class GradStore:
    """The reduced gradients of one step."""

    def __init__(self, ranks: Ranks, places: GradPlaces) -> None:
        self.units: set[int] = set()
        """Those whose gradient, or a part of it, waits in its tier for the update."""
        self.slots: dict[int, set[int]] = {}
        """unit → slots that received a gradient in this step, on any rank; whole once its gradient is where it should
        be.
        """
        self._ranks = ranks
        self._places = places
        self._squares: dict[int, Future[float]] = {}
        self._moves: list[Future[None]] = []
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="infinity-grads")

    def land(self, sent: Sent) -> Future[Gradient]:
        """The gradient with what was stored before added to it, in memory that the update can work in."""
        add = sent.unit.index in self.units
        self.units.discard(sent.unit.index)
        if self._is_small(sent) and (not add or self._places.tier.immediate):
            return _carried_out(self._land, sent, self.slots, add)
        return self._mover.submit(self._land, sent, self.slots, add)

    def keep(self, sent: Sent) -> None:
        """Add it to what is stored, or store it."""
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
        """True if moving it takes less time than waking the thread, and nothing but the tier can make it wait. The
        answer is the same for all gradients of a unit, which keeps them in order.
        """
        places = self._places
        return sent.unit.layout.shard_numel <= INLINE and self._ranks.alone and places.device.host_addressable

    # -- the thread --------------------------------------------------------------------------------------------------

    def _land(self, sent: Sent, slots: dict[int, set[int]], add: bool) -> Gradient:
        """The reduced shard, in memory that its tier's update works in, with what was stored before added to it.

        slots: those of the step, which may have ended before that.
        """
        try:
            sent.reduced.wait()
            slots.setdefault(sent.unit.index, set()).update(sent.present)
            sent.flat = self._ranks.shard(sent.flat)
            self._reach_host(sent)
            squares = self._sum_up(sent, add)
            return Gradient(sent.flat, sent.lease, squares)
        except BaseException:
            sent.lease.release()
            raise
        finally:
            del sent.flat

    def _reach_host(self, sent: Sent) -> None:
        """Copy the shard to the host, if it is there that it is wanted."""
        places, shard = self._places, sent.flat
        if places.host_pool is None:
            sent.reached.wait()  # the update runs in another thread, on a stream of its own
            return
        host = places.host_pool.lease(shard.numel() * shard.element_size())
        try:
            places.device.copy(host.tensor, shard.view(torch.uint8), after=sent.reached).wait()
        except BaseException:
            host.release()
            raise
        sent.move(host, host.flat(shard.dtype))

    def _sum_up(self, sent: Sent, add: bool) -> float:
        """Make the shard what is to be stored: in that dtype and, with `add`, plus what was stored before. Returns the
        sum of squares of the result.
        """
        places, unit, shard = self._places, sent.unit, sent.flat
        dtype = places.dtypes_of(unit).stored
        if not add and dtype == shard.dtype:
            if sent.squares is not None:
                return sent.squares
            return squared_norm(shard, unit.layout.parts(self._ranks.shard_rank), places.threads)
        lease = places.stored_pool.lease(shard.numel() * dtype.itemsize)
        try:
            if add:
                places.tier.read(places.placement.of(unit.index, State.GRAD), lease.tensor).wait()
            if dtype == shard.dtype:
                squares = self._receive(unit, shard, lease.flat(dtype), add=True)
                lease.release()
            else:
                squares = self._receive(unit, lease.flat(dtype), shard, add=add)
                sent.move(lease, lease.flat(dtype))
            return squares
        except BaseException:
            lease.release()
            raise

    def _receive(self, unit: Unit, target: torch.Tensor, source: torch.Tensor, *, add: bool) -> float:
        """Copy or add a shard to another, of any dtypes; padding becomes 0. Returns the sum of squares."""
        squares, end = 0.0, 0
        for part in unit.layout.parts(self._ranks.shard_rank):
            target[end : part.start].zero_()
            place, end = slice(part.start, part.stop), part.stop
            squares += receive(target[place], source[place], add=add, threads=self._places.threads) / part.copies
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
        """The stored gradient of a unit, summed over ranks, whole on every rank: (numel,) in host memory."""
        self.settle()
        places = self._places
        dtype = places.dtypes_of(unit).stored
        flat = host_tensor(unit.layout.numel * dtype.itemsize)
        places.tier.read(places.placement.of(unit.index, State.GRAD), self._ranks.shard(flat)).wait()
        self._ranks.complete(flat)
        return flat.view(dtype)

    def write(self, unit: Unit, flat: torch.Tensor) -> None:
        """Replace it. `flat`: as `read` gave it."""
        shard = self._ranks.shard(flat)
        aligned = host_tensor(shard.numel() * shard.element_size())
        aligned.copy_(shard.view(torch.uint8))
        self._places.tier.write(self._places.placement.of(unit.index, State.GRAD), aligned).wait()
        squares: Future[float] = Future()
        squares.set_result(squared_norm(shard, unit.layout.parts(self._ranks.shard_rank)))
        self._squares[unit.index] = squares

    # -- the step ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient is where it should be; raises what went wrong on the way."""
        moves, self._moves = self._moves, []
        for move in moves:
            move.result()

    def squared_norm(self) -> float:
        """The sum of squares of all stored gradients over all ranks, summed in unit order. Waits for them."""
        return self._ranks.sum_over_shards(sum(self._squares[index].result() for index in sorted(self.units)))

    def hand_over(self) -> list[int]:
        """The units whose gradients are stored, in unit order, and are the update's from now on."""
        units, self.units = sorted(self.units), set()
        return units

    def forget(self) -> None:
        """The step's gradients are dropped, or belong to the update. What is under way comes to its end."""
        self.units = set()
        self.slots = {}
        self._squares = {}

    def discard(self) -> None:
        """Drop everything, whatever went wrong with it."""
        for move in self._moves:
            move.exception()
        self._moves = []
        self.forget()

    def close(self) -> None:
        self._mover.shutdown()
