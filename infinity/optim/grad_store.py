"""Where reduced gradients go: to the update at once, or to their tier, where what comes later in the step is added.

On a thread of its own, in the order in which they were sent, so that backward does not wait for reductions or disks.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from infinity.comm.collectives import Ranks
from infinity.optim.job import Gradient
from infinity.optim.kernels import receive, squared_norm
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.placement import Placement, State
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import Transfer
from infinity.units.layout import Part
from infinity.units.unit import Unit


@dataclass
class GradPlaces:
    """Where gradients go, and the buffers on the way. Pools hold whole units of `dtype` (None: the parameters' own)."""

    device: Device
    tier: Tier
    placement: Placement
    dtype: torch.dtype | None
    pool: Pool
    host_pool: Pool | None
    """Host buffers for shards; None where the host works in the device's buffers."""
    stored_pool: Pool
    """One buffer for a shard that was stored before and is added to."""
    whole: bool
    """Gradients are summed over micro-batches before they are reduced, each in a buffer of `pool` of its own."""
    threads: int
    """Of a pass over a gradient in host memory; 0: one per processor."""

    def dtype_of(self, unit: Unit) -> torch.dtype:
        return self.dtype or unit.layout.dtype


@dataclass
class Sent:
    """A unit's gradient (numel,) that is being reduced, in a leased buffer."""

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
        return self._mover.submit(self._land, sent, self.slots, add)

    def keep(self, sent: Sent) -> None:
        """Add it to what is stored, or store it."""
        index = sent.unit.index
        add = index in self.units
        self.units.add(index)
        squares: Future[float] = Future()
        self._squares[index] = squares
        self._moves.append(self._mover.submit(self._keep, sent, self.slots, add, squares))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _land(self, sent: Sent, slots: dict[int, set[int]], add: bool) -> Gradient:
        """The reduced shard, in memory that its tier's update works in, with what was stored before added to it.

        slots: those of the step, which may have ended before that.
        """
        places = self._places
        lease = sent.lease
        try:
            sent.reduced.wait()
            slots.setdefault(sent.unit.index, set()).update(sent.present)
            shard = self._ranks.shard(sent.flat)
            if places.host_pool is not None:
                host = places.host_pool.lease(shard.numel() * shard.element_size())
                try:
                    places.device.copy(host.tensor, shard.view(torch.uint8), after=sent.reached).wait()
                except BaseException:
                    host.release()
                    raise
                lease.release()
                lease, shard = host, host.flat(shard.dtype)
            else:
                sent.reached.wait()  # the update runs in another thread, on a stream of its own
            squares = self._add_stored(sent.unit, shard) if add else sent.squares
            if squares is None:
                squares = squared_norm(shard, sent.unit.layout.parts(self._ranks.shard_rank), places.threads)
            return Gradient(shard, lease, squares)
        except BaseException:
            lease.release()
            raise
        finally:
            del sent.flat

    def _add_stored(self, unit: Unit, shard: torch.Tensor) -> float:
        """Add what was stored before to the shard; returns the sum of squares of the result."""
        places = self._places
        before = places.stored_pool.lease(shard.numel() * shard.element_size())
        try:
            places.tier.read(places.placement.of(unit.index, State.GRAD), before.tensor).wait()
            stored = before.flat(shard.dtype)
            parts = unit.layout.parts(self._ranks.shard_rank)
            return sum((self._add(shard, stored, part) for part in parts), 0.0)
        finally:
            before.release()

    def _add(self, shard: torch.Tensor, stored: torch.Tensor, part: Part) -> float:
        place = slice(part.start, part.stop)
        return receive(shard[place], stored[place], add=True, threads=self._places.threads) / part.copies

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
        flat = host_tensor(unit.layout.numel * places.dtype_of(unit).itemsize)
        places.tier.read(places.placement.of(unit.index, State.GRAD), self._ranks.shard(flat)).wait()
        self._ranks.complete(flat)
        return flat.view(places.dtype_of(unit))

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
