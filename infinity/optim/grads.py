"""Gradients leave as they arrive: from `.grad` into the unit's flat gradient, reduced over ranks, then to the
update or to their tier.

A unit's gradient is complete after as many arrivals as the backward before saw, or when backward ends. Gradients are
never all in memory at once: buffers come from a fixed pool, and when incomplete ones fill it, the one that has waited
longest is sent on and completed by addition.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from infinity.comm.collectives import Ranks
from infinity.errors import LifetimeError
from infinity.interrupts import uninterrupted
from infinity.optim.kernels import receive, squared_norm
from infinity.optim.update import Gradient
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.placement import Placement, State
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Transfer
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
class _Open:
    """A unit's gradient that is being collected."""

    lease: Lease
    flat: torch.Tensor
    squares: dict[int, float | None] = field(default_factory=dict)
    """slot that has arrived → its sum of squares; None where that is taken later."""

    present: set[int] = field(default_factory=set)
    """Slots with a gradient, on any rank once it is reduced."""
    slots: dict[int, set[int]] = field(default_factory=dict)
    """Where they are noted: `GradCollector.slots` of the step, which may have ended before that."""

    def total(self) -> float | None:
        """The sum of squares over all slots, in order; None if any is missing."""
        total = 0.0
        for slot in sorted(self.squares):
            square = self.squares[slot]
            if square is None:
                return None
            total += square
        return total


class GradCollector:
    """Collects the gradients of one step. Called from the thread that runs backward; moves and sums on a thread of
    its own.
    """

    def __init__(self, units: Sequence[Unit], ranks: Ranks, places: GradPlaces) -> None:
        self._units = units
        self._ranks = ranks
        self._places = places
        self._open: dict[int, _Open] = {}
        self._arrivals: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._passed: set[int] = set()
        """Units that backward has used for the last time; with several ranks."""
        self._late: set[int] = set()
        """Units that ever received a gradient after that."""
        self._punctual: set[int] = set()
        """Units that were passed before, and are never late."""
        self._sent_live: set[int] = set()
        self._squares: dict[int, Future[float]] = {}
        self._moves: list[Future[None]] = []
        self.mover = ThreadPoolExecutor(1, thread_name_prefix="infinity-grads")
        self.stored: set[int] = set()
        """Units whose gradient, or a part of it, waits in its tier for the update."""
        self.slots: dict[int, set[int]] = {}
        """unit → slots that received a gradient in this step, on any rank; whole once its gradient is where it should
        be.
        """
        self.last_micro_step = False
        self.wait_seconds = 0.0
        self.take_live: Callable[[Unit, Future[Gradient]], None] | None = None
        """Called with a complete gradient that the update can use at once; see `wants_live`."""
        self.wants_live: Callable[[Unit], bool] = lambda unit: False
        self.on_arrival: Callable[[], None] = lambda: None

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
        # Weak: the garbage collector does not see what these hooks refer to, so that a cycle through them would stay.
        collector, index = weakref.ref(self), unit.index

        def arrived(parameter: torch.Tensor) -> None:
            alive = collector()
            if alive is not None:
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                alive.arrive(alive._units[index], slot, gradient)

        return arrived

    @uninterrupted()
    def arrive(self, unit: Unit, slot: int, gradient: torch.Tensor) -> None:
        self.on_arrival()
        index = unit.index
        if index in self._sent_live:
            raise LifetimeError(
                f"unit {unit.name} received a gradient after its update in the same step. Load the last checkpoint. "
                "For several backwards a step set gradient_accumulation_steps; for a model that uses a unit more often "
                'than in the step before set infinity.update to "next_forward", which waits for engine.step().'
            )
        collecting = self._open.get(index) or self._begin(unit)
        place = unit.layout.slots[slot]
        view = collecting.flat[place.offset : place.stop].view(place.shape)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        collecting.squares[slot] = self._put(view, gradient, add=slot in collecting.squares)
        self._arrivals[index] = self._arrivals.get(index, 0) + 1
        if index in self._passed:
            self._late.add(index)
        complete = self._arrivals[index] == self._expected.get(index, len(unit.parameters))
        if complete and self._sends and self._ranks.alone:
            self._send(unit, complete=True)

    @uninterrupted()
    def moved_on(self, to: Unit, finished: Callable[[int], bool]) -> None:
        """A unit is used that is not the one before. Several ranks send the gradients of `finished` ones here.

        They have to send in the same order, and which parameters get a gradient, and so how many arrive, may differ
        (experts that no token of a rank was for). Which units are used does not. A unit of which gradients arrive after
        its last use (an embedding that saves nothing for backward) is sent when backward ends.
        """
        if self._ranks.alone or not self.in_mid_backward:
            return
        for index in list(self._open):
            if index != to.index and index not in self._passed and finished(index):
                self._passed.add(index)
                if index in self._punctual and self._sends:
                    self._send(self._units[index], complete=True)

    @property
    def _sends(self) -> bool:
        """Whether gradients leave in this micro-batch, or stay whole where they are summed until the last one."""
        return self.last_micro_step or not self._places.whole

    def _put(self, view: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> float | None:
        """Copy or add a gradient to its place. Its sum of squares is taken in the same pass where it is final: on one
        rank, and where that does not make the host wait for the device.
        """
        if self._ranks.alone and self._places.device.host_addressable:
            return receive(view, gradient, add=add, threads=self._places.threads)
        if add:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        return None

    def _begin(self, unit: Unit) -> _Open:
        dtype = self._places.dtype_of(unit)
        nbytes = unit.layout.numel * dtype.itemsize
        pool = self._places.pool
        # Whether one is sent on early follows from the order of arrivals alone: sending is a collective.
        rivals = [
            i for i, other in self._open.items() if pool.size_class(other.lease.nbytes) == pool.size_class(nbytes)
        ]
        if len(rivals) == pool.count(nbytes):
            self._send(self._units[rivals[0]], complete=False)
        began = time.perf_counter()
        lease = pool.lease(nbytes)
        self.wait_seconds += time.perf_counter() - began
        self._open[unit.index] = _Open(lease, lease.flat(dtype, unit.layout.numel))
        return self._open[unit.index]

    # -- departure ---------------------------------------------------------------------------------------------------

    @uninterrupted()
    def end_backward(self) -> bool:
        """Send what is still incomplete, and learn how many arrivals make each unit complete. False: nothing
        arrived.
        """
        for index in list(self._open) if self._sends else ():
            self._send(self._units[index], complete=True)
        self._expected, self._arrivals = self._arrivals, {}
        self._punctual |= self._passed
        self._punctual -= self._late
        self._passed = set()
        return bool(self._expected)

    @property
    def in_mid_backward(self) -> bool:
        """Whether gradients have arrived in a backward that has not ended."""
        return bool(self._arrivals)

    @property
    def spent(self) -> bool:
        """Whether units have been updated with gradients of the present step."""
        return bool(self._sent_live)

    def _send(self, unit: Unit, *, complete: bool) -> None:
        collecting = self._open.pop(unit.index)
        flat = collecting.flat
        collecting.present.update(collecting.squares)
        collecting.slots = self.slots
        for start, stop in unit.layout.gaps():
            flat[start:stop].zero_()
        for slot, place in enumerate(unit.layout.slots):
            if slot not in collecting.squares:
                flat[place.offset : place.stop].zero_()
        reduced = self._ranks.reduce(flat, DONE, unit.layout, collecting.present)
        reached = self._places.device.compute_reached()
        add = unit.index in self.stored
        live = complete and self.last_micro_step and self.take_live is not None and self.wants_live(unit)
        if live:
            self.stored.discard(unit.index)
            self._sent_live.add(unit.index)
            gradient = self.mover.submit(self._land, unit, collecting, reduced, reached, add)
            assert self.take_live is not None
            self.take_live(unit, gradient)
            return
        self.stored.add(unit.index)
        squares: Future[float] = Future()
        self._squares[unit.index] = squares
        self._moves.append(self.mover.submit(self._keep, unit, collecting, reduced, reached, add, squares))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _land(self, unit: Unit, collecting: _Open, reduced: Transfer, reached: Transfer, add: bool) -> Gradient:
        """The reduced shard, in memory that its tier's update works in, with what was stored before added to it."""
        places = self._places
        lease = collecting.lease
        try:
            reduced.wait()
            collecting.slots.setdefault(unit.index, set()).update(collecting.present)
            shard = self._ranks.shard(collecting.flat)
            if places.host_pool is not None:
                host = places.host_pool.lease(shard.numel() * shard.element_size())
                try:
                    places.device.copy(host.tensor, shard.view(torch.uint8), after=reached).wait()
                except BaseException:
                    host.release()
                    raise
                lease.release()
                lease, shard = host, host.flat(shard.dtype)
            else:
                reached.wait()  # the update runs in another thread, on a stream of its own
            squares = self._add_stored(unit, shard) if add else collecting.total()
            if squares is None:
                squares = squared_norm(shard, unit.layout.parts(self._ranks.shard_rank), places.threads)
            return Gradient(shard, lease, squares)
        except BaseException:
            lease.release()
            raise
        finally:
            del collecting.flat

    def _add_stored(self, unit: Unit, shard: torch.Tensor) -> float:
        """Add what was stored before to the shard; returns the sum of squares of the result."""
        places = self._places
        before = places.stored_pool.lease(shard.numel() * shard.element_size())
        try:
            places.tier.read(places.placement.of(unit.index, State.GRAD), before.tensor).wait()
            stored = before.flat(shard.dtype)
            parts = unit.layout.parts(self._ranks.shard_rank)
            return sum((receive(shard[a:b], stored[a:b], add=True, threads=places.threads) for a, b in parts), 0.0)
        finally:
            before.release()

    def _keep(
        self, unit: Unit, collecting: _Open, reduced: Transfer, reached: Transfer, add: bool, squares: Future[float]
    ) -> None:
        try:
            gradient = self._land(unit, collecting, reduced, reached, add)
            try:
                squares.set_result(gradient.squares)
                extent = self._places.placement.of(unit.index, State.GRAD)
                self._places.tier.write(extent, gradient.shard.view(torch.uint8)).wait()
            finally:
                gradient.release()
        except BaseException as error:
            if not squares.done():
                squares.set_exception(error)
            raise

    # -- access ------------------------------------------------------------------------------------------------------

    def is_collecting(self, unit: Unit) -> bool:
        """Whether gradients of the unit are on the way to being summed."""
        return unit.index in self._open

    def is_updating(self, unit: Unit) -> bool:
        """Whether the unit's gradient of this step has gone to its update."""
        return unit.index in self._sent_live

    def read_stored(self, unit: Unit) -> torch.Tensor:
        """The stored gradient of a unit, summed over ranks, whole on every rank: (numel,) in host memory."""
        self.settle()
        places = self._places
        flat = host_tensor(unit.layout.numel * places.dtype_of(unit).itemsize)
        places.tier.read(places.placement.of(unit.index, State.GRAD), self._ranks.shard(flat)).wait()
        self._ranks.complete(flat)
        return flat.view(places.dtype_of(unit))

    def write_stored(self, unit: Unit, flat: torch.Tensor) -> None:
        """Replace it. `flat`: as `read_stored` gave it."""
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
        return self._ranks.sum_over_shards(sum(self._squares[index].result() for index in sorted(self.stored)))

    def hand_over(self) -> list[int]:
        """The units whose gradients are stored, in unit order. Their updates are due: they take no more gradients."""
        units, self.stored = sorted(self.stored), set()
        self._sent_live.update(units)
        return units

    def end_step(self) -> None:
        """Forget the step: its gradients belong to the update now."""
        self.stored = set()
        self.slots = {}
        self._squares = {}
        self._sent_live = set()

    @uninterrupted()
    def discard(self) -> None:
        """Drop everything collected so far, after a backward that did not end."""
        for collecting in self._open.values():
            collecting.lease.release()
        self._open = {}
        self._arrivals = {}
        self._passed = set()
        for move in self._moves:
            move.exception()
        self._moves = []
        self.end_step()
