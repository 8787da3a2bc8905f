"""The unit store: fetches units into device buffers before they are used and evicts those that are needed last.

Device buffers are a fixed pool. A unit that is wanted takes a free buffer, or the buffer of the resident unit whose
next use is furthest away (Belady's rule over the recorded trace; least recently used while there is none). Nothing is
released before its buffer is needed, and nothing is released that is held by a running forward, viewed by somebody, or
still being written.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from infinity.comm.collectives import Ranks
from infinity.errors import InfinityError, RanksError
from infinity.interrupts import ForcedInterrupt, uninterrupted
from infinity.optim.job import UpdateJob
from infinity.optim.update import UpdatePipeline
from infinity.schedule.trace import Tracer
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.placement import Placement, State
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Both, Transfer
from infinity.units import saved
from infinity.units.unit import Residency, Unit


class UnitStore:
    """All units of one engine. Called from the thread that runs the model, never from two at once."""

    def __init__(
        self,
        units: Sequence[Unit],
        pool: Pool,
        tier: Tier,
        placement: Placement,
        device: Device,
        ranks: Ranks,
        prefetch_bytes: int,
    ) -> None:
        self.units = list(units)
        self.tracer = Tracer()
        self.wait_seconds = 0.0
        self.fetches = 0
        self.quarantined: set[int] = set()
        """Units whose buffer was released while somebody had a view of it."""
        self.lingered: set[int] = set()
        """Units that were released while somebody was using a parameter it was lent."""
        self.failure: OSError | ForcedInterrupt | RanksError | None = None
        """A transfer that failed: what it should have moved is not where it should be, and nothing may build on it."""
        self.pipeline: UpdatePipeline | None = None
        self.on_move: Callable[[Unit, Callable[[int], bool]], None] = lambda unit, passed: None
        """Called when another unit is used than before, and with what tells whether a unit is used again."""
        self.adopt: Callable[[Unit], None] = lambda unit: None
        """Called with a resident unit whose parameters were edited, before the edit is written back or updated."""
        self._pool = pool
        self._tier = tier
        self._placement = placement
        self._device = device
        self._ranks = ranks
        self._prefetch_bytes = prefetch_bytes

    # -- use ---------------------------------------------------------------------------------------------------------

    def use(self, unit: Unit) -> None:
        """The unit's parameters are needed now: wait until they are resident, and start what the trace says comes
        next.
        """
        news = self.tracer.touch(unit.index)
        if news:
            self.on_move(unit, self.tracer.passed)
        if unit.residency is Residency.RESIDENT and not news:
            return
        with self._moving():
            if unit.residency is not Residency.RESIDENT:
                self._arrive(unit)
            self.prefetch()

    def hold(self, unit: Unit) -> None:
        self.use(unit)
        unit.holds += 1

    def unhold(self, unit: Unit) -> None:
        unit.holds -= 1

    def finished_with(self, unit: Unit) -> bool:
        """Whether nothing in this step needs the unit's parameters any more, so that its update may start.

        No running forward, no saved tensor, no view, no code that was lent a parameter and, as far as the trace knows,
        no recomputation.
        """
        resident = unit.residency is Residency.RESIDENT
        wanted = unit.holds or unit.references or unit.is_lent()
        if resident and not wanted and self._ranks.alone:
            # Non-reentrant recomputation keeps views themselves until backward has used them. Several ranks, which must
            # decide alike, are sure of that by `passed`.
            wanted = unit.is_viewed()
        # How often a unit is used may differ between ranks (experts), in which order units are may not.
        over = self.tracer.finished_with if self._ranks.alone else self.tracer.passed
        return resident and not wanted and over(unit.index)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        try:
            # Buffers and the tensors that move them outlive a user's inference mode, and must not be of its kind.
            with uninterrupted(), torch.inference_mode(False):
                yield
        except (OSError, ForcedInterrupt, RanksError) as error:
            self.failure = error
            raise

    def resident(self) -> list[Unit]:
        return [unit for unit in self.units if unit.lease is not None]

    # -- fetch -------------------------------------------------------------------------------------------------------

    def _arrive(self, unit: Unit) -> None:
        if unit.residency is Residency.RELEASED:
            unit.check_placeholders()
            lease = self._lease_for(unit)
            self._start(unit, lease)
        if unit.residency is Residency.UPDATING:
            self._follow_update(unit)
        assert unit.transfer is not None
        transfer, unit.transfer = unit.transfer, None
        began = time.perf_counter()
        try:
            self._device.await_copy(transfer)
        except BaseException:
            self._drop(unit)
            raise
        self.wait_seconds += time.perf_counter() - began
        unit.move(Residency.RESIDENT)
        unit.bind()
        saved.register(unit, self)

    def _start(self, unit: Unit, lease: Lease) -> None:
        """RELEASED → FETCHING, by way of the update that is due."""
        unit.lease = lease
        self.fetches += 1
        if unit.pending_job is not None:
            self.start_update(unit, unit.pending_job)
            self._follow_update(unit)
            return
        unit.move(Residency.FETCHING)
        extent = self._placement.of(unit.index, State.PARAM)
        read = self._tier.read(extent, unit.shard_bytes(self._ranks.shard_rank))
        unit.transfer = self._ranks.all_gather(unit.flat(), read, unit.index)

    def _follow_update(self, unit: Unit) -> None:
        """UPDATING → FETCHING: what the update leaves in the buffer is the unit, once the other shards are gathered."""
        assert unit.job is not None
        unit.move(Residency.FETCHING)
        unit.transfer = self._ranks.all_gather(unit.flat(), unit.job.computed, unit.index)

    def prefetch(self) -> None:
        """Start to fetch the units that the trace says come next, as far as `prefetch_bytes` and the pool reach."""
        budget = self._prefetch_bytes
        for index in self.tracer.upcoming():
            unit = self.units[index]
            budget -= unit.layout.nbytes
            if budget < 0:
                return
            if unit.residency is Residency.UPDATING:
                self._follow_update(unit)
            if unit.residency is not Residency.RELEASED:
                continue
            unit.check_placeholders()
            lease = self._lease_ahead(unit)
            if lease is None:
                return
            self._start(unit, lease)

    # -- update ------------------------------------------------------------------------------------------------------

    @uninterrupted()
    def start_update(self, unit: Unit, job: UpdateJob) -> None:
        """→ UPDATING: the update works on this rank's shard of the leased buffer, which holds the parameters, is
        being filled with them, or, for a unit that was RELEASED, is filled by the update.
        """
        assert unit.lease is not None and self.pipeline is not None
        arrives: Transfer | None = None
        if unit.residency is Residency.RESIDENT:
            arrives = DONE
            if unit.edited():
                if unit.job is not None:
                    unit.job.done.wait()
                unit.copied.wait()
                self.adopt(unit)
            saved.unregister(unit)
        elif unit.residency is Residency.FETCHING:
            arrives, unit.transfer = unit.transfer, None
        unit.unbind()
        unit.move(Residency.UPDATING)
        unit.pending_job = None
        unit.generation += 1
        job.after = unit.copied if unit.job is None else Both(unit.job.done, unit.copied)
        unit.job = job
        job.attach(unit.shard_bytes(self._ranks.shard_rank), arrives)
        self.pipeline.submit(job)

    def settle(self) -> None:
        """Start every update that is due and wait until all are done, written back included."""
        with self._moving():
            for unit in self.units:
                if unit.pending_job is not None:
                    if unit.residency is Residency.RELEASED:
                        unit.check_placeholders()
                        unit.lease = self._lease_for(unit)
                    self.start_update(unit, unit.pending_job)
            for unit in self.units:
                if unit.job is not None:
                    unit.job.done.wait()

    # -- release -----------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Every unit back to its tier, edits included. Nothing may be held."""
        with self._moving():
            for unit in self.units:
                if unit.lease is not None:
                    self._evict(unit)

    def abandon(self) -> None:
        """Take the parameters out of the buffers without writing anything back: the engine ends after an error."""
        for unit in self.units:
            if unit.residency is Residency.RESIDENT:
                saved.unregister(unit)
                unit.unbind()

    def _evict(self, unit: Unit) -> None:
        if unit.job is not None:
            job, unit.job = unit.job, None
            job.done.wait()
        if unit.transfer is not None:
            transfer, unit.transfer = unit.transfer, None
            transfer.wait()
        if unit.residency is Residency.RESIDENT:
            if unit.edited():
                unit.copied.wait()
                self.adopt(unit)
                self._write_back(unit)
            saved.unregister(unit)
            if unit.is_lent():
                unit.linger()
            else:
                unit.unbind()
        self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        assert unit.lease is not None
        unit.move(Residency.RELEASED)
        lease, unit.lease = unit.lease, None
        if unit.lingers:
            lease.quarantine()
            self.lingered.add(unit.index)
        elif lease.is_referenced():
            lease.quarantine()
            self._name_viewer(unit)
        else:
            lease.release()

    def _write_back(self, unit: Unit) -> None:
        extent = self._placement.of(unit.index, State.PARAM)
        self._tier.write(extent, unit.shard_bytes(self._ranks.shard_rank)).wait()

    def _name_viewer(self, unit: Unit) -> None:
        handling = sys.exc_info()[0] is not None  # then its traceback refers to whatever its frames did
        if unit.index not in self.quarantined and not handling:
            self.quarantined.add(unit.index)
            warnings.warn(
                f"something still refers to the parameters of unit {unit.name} after it was released: a view that a "
                "module kept, or a non-reentrant checkpoint over more units than fit. The values stay valid, at the "
                "price of one more buffer; keep `parameter.clone()`, or checkpoint fewer blocks at a time, to avoid "
                "that.",
                stacklevel=2,
            )

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _lease_ahead(self, unit: Unit) -> Lease | None:
        """A buffer for a prefetch: a free one, or one whose unit is needed later than this one. Never waits on one
        rank.

        Several ranks must prefetch alike, whatever the timing, so there it waits for the buffer that the trace chooses.
        """
        nbytes = unit.layout.nbytes
        lease = self._pool.try_lease(nbytes)
        if lease is not None:
            return lease
        wanted = self.tracer.next_use(unit.index)
        for victim in self._victims(nbytes):
            if self.tracer.next_use(victim.index) <= wanted:
                return None
            if self._ranks.alone and _busy(victim):
                continue
            self._evict(victim)
            return self._pool.try_lease(nbytes)
        return None

    def _lease_for(self, unit: Unit) -> Lease:
        """A buffer for a unit that is needed now: waits for updates and for prefetches that came too early."""
        nbytes = unit.layout.nbytes
        lease = self._pool.try_lease(nbytes)
        if lease is not None:
            return lease
        victims = self._victims(nbytes)
        order: Callable[[Unit], bool] = _busy if self._ranks.alone else (lambda _: False)
        for victim in sorted(victims, key=order):
            self._evict(victim)
            lease = self._pool.try_lease(nbytes)
            if lease is not None:
                return lease
        for victim in self._victims(nbytes, viewed=True):
            self._evict(victim)
            return self._pool.lease(nbytes)
        held = ", ".join(other.name for other in self.units if other.lease is not None and other.holds)
        raise InfinityError(
            f"unit {unit.name} needs a device buffer, and all buffers of its size are in use by modules that are "
            f"running ({held}). "
            "Raise infinity.prefetch_bytes, which sets how many units fit, or infinity.unit_size, so that fewer are "
            "open at once."
        )

    def _victims(self, nbytes: int, *, viewed: bool = False) -> list[Unit]:
        """Units whose buffer could be taken, the one whose next use is furthest first."""
        size = self._pool.size_class(nbytes)
        found = [
            unit
            for unit in self.units
            if unit.lease is not None
            and not unit.holds
            and self._pool.size_class(unit.layout.nbytes) == size
            and unit.index != self.tracer.last
            and self._is_viewed(unit) == viewed
        ]
        return sorted(found, key=lambda unit: self.tracer.next_use(unit.index), reverse=True)

    def _is_viewed(self, unit: Unit) -> bool:
        """Whether it is better kept: something refers to its buffer, if only a write that is under way.

        Several ranks must choose alike, and when a reference ends is a matter of timing: there a buffer that turns out
        to be referred to is replaced.
        """
        return self._ranks.alone and unit.residency is Residency.RESIDENT and unit.is_viewed()


def _busy(unit: Unit) -> bool:
    """Whether taking the unit's buffer would have to wait."""
    if unit.job is not None and not unit.job.done.done():
        return True
    return unit.transfer is not None and not unit.transfer.done()
