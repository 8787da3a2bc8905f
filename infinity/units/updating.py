"""Hands the buffers of units to their updates: RESIDENT, FETCHING or RELEASED → UPDATING.

An update works in the unit's buffer, in a copy of it, or in the unit's tier alone. The parameters are placeholders
meanwhile, so that nothing but the update changes them. `UnitStore.follow_update` fetches the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from infinity.tiers.transfer import DONE, Together, Transfer
from infinity.units import binding, released
from infinity.units.store import UnitStore
from infinity.units.unit import Residency, Unit
from infinity.units.write_back import EditCheck
from infinity.update.job import PlacedUpdate, UpdateJob


class UpdatingUnits:
    """The units of `store`, as far as updates take their buffers. `TrainingRunner` says when."""

    def __init__(self, store: UnitStore, in_tier: Collection[int], written_late: Collection[int]) -> None:
        """in_tier: units whose update begins from their parameters in their tier, not from those in their buffer.
        written_late: units whose update leaves its result in the buffer (`Plan.written_late`).
        """
        self.store = store
        self._in_tier = frozenset(in_tier)
        self._written_late = frozenset(written_late)

    def assign(self, unit: Unit) -> None:
        """Assign a buffer to a released unit, for an update that fills it."""
        self.store.collect_left_by(unit)
        self.store.give(unit, self.store.lease(unit))

    def place(self, unit: Unit, job: UpdateJob) -> PlacedUpdate:
        """→ UPDATING: hand this rank's shard of the leased buffer to an update. `leave_if_unused` follows.

        The buffer holds the parameters, is being filled with them, or, for a RELEASED unit, is filled by the update.
        Without a buffer, the update changes the tier alone, and the unit stays RELEASED.
        """
        store, kept = self.store, self.store.kept
        # Kernels of the model that were issued before may still read the buffer that the update writes.
        reached = store.device.compute_reached()
        arrives: Transfer | None = None
        early, viewed, leaves = job.gradient is not None, False, unit.lease is None
        prepare: Callable[[], None] | None = None
        check: EditCheck | None = None
        if unit.residency is Residency.RESIDENT:
            arrives = reached
            viewed = unit.is_viewed()
            if viewed and early and unit.update is not None:
                with store.moves.moving():
                    store.moves.await_update(unit.update)  # its write refers to the buffer too
                viewed = unit.is_viewed()
            # Views may show the past until the unit is fetched into this buffer again [Note: kept views].
            if viewed:
                kept.note_overwritten(unit)
            # A draft may be taken back, so an edit before it must be in the tiers.
            in_tiers = unit.index in self._in_tier or job.draft is not None
            prepare, check = store.write_back.take(unit, later=not viewed, writes=in_tiers)
            store.leave(unit)
            leaves = early and self._is_rewritten_in_tier_only(unit)
            # Backward may still read through a view, so an early update gets a copy in another buffer.
            if early and viewed and not leaves:
                arrives = self._leave_to_viewers(unit)
        elif unit.residency is Residency.FETCHING:
            arrives = unit.take_transfer()
            # A prefetched unit: the update waits for its fetch in place of reading the parameters again.
            unit.note_read(arrives or DONE)
        if unit.lease is not None and unit.lease.is_substituted:
            kept.note_overwritten(unit)
        # Views stay attached to the buffer, so the parameters change their type and keep their memory.
        if kept.is_overwritten(unit):
            released.release(unit)
        else:
            binding.unbind(unit)
        unit.move(Residency.UPDATING)
        after: Transfer = job.gate
        if unit.update is not None:
            # A gate that is done may have failed, and its error has to be raised.
            after = unit.update.done if job.gate is DONE else Together(job.gate, unit.update.done)
        fetched = unit.fetched
        unit.note_read(DONE)
        writes = unit.index not in self._written_late
        unit.begin_update(job.progress, early=early, writes=writes)
        # A buffer that is released at once gets no copy of the result: the next fetch reads the tier.
        target = None if leaves else unit.shard_bytes(store.ranks.shard_rank)
        if unit.lease is None:
            unit.move(Residency.RELEASED)
        elif leaves and check is not None:
            unit.move(Residency.RELEASED)
            store.buffers.leave(unit, check, job.progress, in_backward=False)
        checked = DONE if check is None else check.copied
        return PlacedUpdate(job, target, arrives, reached, fetched, after, prepare, checked, writes)

    def needs_no_buffer(self, unit: Unit) -> bool:
        """Return whether a released unit can be updated in its tier at once, while the device computes.

        If the host computes, updates wait for their unit's next use, so that the first forward does not wait for them.
        """
        is_alone = unit not in self.store.kept and self.store.buffers.left_by(unit) is None
        return is_alone and unit.index in self._in_tier and not self.store.device.host_addressable

    def leave_if_unused(self, unit: Unit, *, in_tier_alone: bool) -> None:
        """Release the buffer of a unit whose submitted update does not use it. Warnings come last: they may raise."""
        if in_tier_alone:
            if unit.lease is not None:  # else it is compared first
                self.store.drop(unit, valid=False)
        elif unit in self.store.kept:
            self.store.kept.warn(unit)

    def release_passed(self, unit: Unit) -> None:
        """Release the buffer of a unit past its last use that may not be updated here, if other ranks may update it in
        its tier alone.

        References may differ between ranks; the buffers that are free may not, since they decide what is fetched next.
        """
        if self._is_rewritten_in_tier_only(unit):
            with self.store.moves.moving():
                self.store.evict(unit)

    def take_back(self, unit: Unit, *, keeps_buffer: bool) -> None:
        """Note that the draft of a unit's update, which has ended, was taken back: → RELEASED.

        keeps_buffer: keep the unit's buffer, if it has one, for an update that fills it.
        """
        unit.take_update()
        unit.take_back()
        if unit.lease is not None:
            if keeps_buffer:
                unit.move(Residency.RELEASED)
            else:
                self.store.drop(unit, valid=False)

    def _is_rewritten_in_tier_only(self, unit: Unit) -> bool:
        """Return whether the unit's buffer is released as its update starts, so that nothing is copied into it.

        Follows from the plan and the trace, which ranks share.
        """
        return unit.index in self._in_tier and self.store.buffers.leaves_first(unit)

    def _leave_to_viewers(self, unit: Unit) -> Transfer:
        """Leave the buffer to its views, which backward may read until the step ends.

        Returns the transfer that copies the parameters into a fresh buffer, for the update.
        """
        assert unit.lease is not None
        kept = self.store.kept.keep(unit, unit.lease)
        lease = self.store.buffers.exchange(unit)
        return self.store.device.copy(lease.tensor, kept.buffer[: lease.nbytes])
