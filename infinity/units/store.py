"""The unit store: fetches units into device buffers before use, and evicts units by Belady's rule.

A unit is evicted only when another one needs its buffer (`infinity.units.buffers`), and never while a running forward
holds it or a write of it is under way. Its edits are written as it leaves (`infinity.units.write_back`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from infinity.comm.communicator import Communicator
from infinity.schedule.schedule import Schedule
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Fingerprinted, Transfer, issued
from infinity.units import binding, released, residents
from infinity.units.buffers import Leaving, UnitBuffers
from infinity.units.kept import KeptBuffers, edit_lost
from infinity.units.states import UnitStates
from infinity.units.unit import Moves, Residency, Unit
from infinity.units.write_back import WriteBack


class UnitStore:
    """All units of one engine: moves their parameters between tiers and device buffers. `Runner`
    (`infinity.engine.runner`) says when. Any thread may call it, one at a time.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pool: Pool,
        states: UnitStates,
        device: Device,
        ranks: Communicator,
        schedule: Schedule,
        in_place: Collection[int],
    ) -> None:
        """pool: device buffers. in_place: units whose buffer is their extent."""
        self.units = list(units)
        self.resident = binding.ResidentUnits()
        self.fetches = 0
        self.moves = Moves(device.recorder)
        self.kept = KeptBuffers(pool, device)
        self.buffers = UnitBuffers(self.units, pool, schedule, {i: states.in_place(units[i].layout) for i in in_place})
        self.write_back = WriteBack(states, device, ranks, self.moves, len(units), in_place)
        self.device = device
        self.ranks = ranks
        self._schedule = schedule
        self._states = states

    # -- units in use ------------------------------------------------------------------------------------------------

    def hold(self, unit: Unit, *, has_arrived: bool) -> None:
        """Keep a resident unit in its buffer until `unhold`. has_arrived: just now, so nobody has assigned data yet."""
        if not unit.pin_count:
            # Now, so that a checkpoint's recomputation sees the same tensors.
            if not has_arrived:
                binding.adopt_assigned(unit, self.moves.recorder)
            unit.check_frozen()
        unit.pin()

    def unhold(self, unit: Unit) -> None:
        unit.unpin()
        if not unit.pin_count and self.buffers.exceed(unit):
            with self.moves.moving():
                self.release(unit)

    def is_viewed(self, unit: Unit) -> bool:
        """Return whether anything but its parameters refers to a resident unit's buffer, once no update writes it."""
        if unit.update is not None and not unit.update.done.done():
            with self.moves.moving():
                self.moves.await_update(unit.update)  # its write refers to the buffer too, which would count as a view
        return unit.is_viewed()

    def await_updates(self, units: Iterable[Unit] | None = None) -> None:
        """Wait until the updates of `units`, by default of all, that were started are written back."""
        with self.moves.moving():
            for unit in self.units if units is None else units:
                self.moves.await_update(unit.update)

    def showing_past(self) -> list[Unit]:
        """Return the units whose live views show old values on any rank. Collective."""
        past = {unit.index for unit in self.units if self.kept.shows_past(unit)}
        self.kept.forget_overwritten()
        # The fetches that follow are collectives, and ranks may hold different views.
        past = self.ranks.union(past)
        return [self.units[index] for index in sorted(past)]

    # -- fetch -------------------------------------------------------------------------------------------------------

    def lease(self, unit: Unit) -> Lease:
        """Return a buffer for a released unit that is needed now. Waits for updates and premature prefetches."""
        # A free buffer costs no eviction, so it comes before any victim [Note: why eviction follows Belady].
        lease = self._free(unit)
        if lease is not None:
            return lease
        for victim in self.buffers.by_cost(unit):
            self.release(victim)
            lease = self.buffers.free(unit)
            if lease is not None:
                return lease
        # All buffers of this size are held: nested modules and GatheredParameters may hold more units than the plan
        # expects.
        return self.buffers.extra(unit)

    def lease_ahead(self, unit: Unit) -> Lease | None:
        """Return a buffer for a prefetch: a free one, or that of a unit needed later than `unit`; else None.

        Does not wait on a single rank. Several ranks wait for the buffer that the trace selects.
        """
        if unit.update is not None and not unit.update.done.done() and self.ranks.is_single:
            return None  # its update is under way in the tier alone
        lease = self._free(unit)
        # One victim is enough, since buffers of a size class are interchangeable.
        if lease is None and (victim := next(self.buffers.later_than(unit), None)) is not None:
            self.release(victim)
            lease = self.buffers.free(unit)
        return lease

    def _free(self, unit: Unit) -> Lease | None:
        """Return a buffer that is free, or that a unit has left: its comparison is collected first."""
        # A free one first, so that a comparison is collected as late as possible.
        lease = self.buffers.free(unit)
        while lease is None and (leaving := self.buffers.leaving(unit)) is not None:
            self._collect(leaving)
            lease = self.buffers.free(unit)  # None: an extra buffer was freed instead
        return lease

    def assign(self, unit: Unit, lease: Lease) -> bool:
        """Assign a buffer to a released unit, before its fetch or its update.

        Returns True if the buffer already holds this rank's shard. An unsharded unit may be resident at once.
        """
        holds = False
        self.collect_left_by(unit)  # its edit belongs in the tier, which is read next
        if unit.updated_early:  # backward may still read a buffer that was left to views: `_return_to_viewers`
            self.buffers.give(unit, lease)
        else:
            holds = self.give(unit, lease)
        self.fetches += not self.buffers.in_place(unit)
        return holds

    def give(self, unit: Unit, lease: Lease) -> bool:
        """Assign a lease to a unit, with its kept buffer in place of the pool's if views of the kept one are alive.

        If the kept buffer holds the present parameters, edits made through views stay. An unsharded unit becomes
        RESIDENT at once; for a sharded one without a pending update, returns True: the buffer holds this rank's shard.
        Otherwise returns False. Raises LifetimeError if a view was edited and the parameters have been overwritten
        since, or will be by a pending update.
        """
        self.buffers.give(unit, lease)
        if unit not in self.kept:
            return self.buffers.in_place(unit)
        needed = self.kept.is_viewed(unit) or self.kept.is_edited(unit)
        kept = self.kept.take(unit)
        # Nobody sees the kept buffer any more: it is freed with its last reference.
        if not needed:
            binding.unbind(unit)
            return False
        present = kept.generation == unit.generation
        lease.substitute(kept.buffer)
        # One shard is the whole unit, so nothing has to be gathered.
        if present and self.ranks.shards == 1:
            unit.move(Residency.FETCHING)
            self._land(unit)
        elif present and unit.due_update is None:
            return True
        elif self.kept.is_edited(unit, kept):
            self.buffers.take(unit).release()
            raise edit_lost(unit)
        return False

    def fetch(self, unit: Unit, *, holds: bool) -> None:
        """RELEASED → FETCHING. holds: as returned by `assign`."""
        # `assign` has bound the unit to its kept buffer, which holds every shard.
        if unit.residency is Residency.RESIDENT:
            return
        unit.move(Residency.FETCHING)
        self.moves.await_update(unit.update)  # an update in the tier alone
        read: Transfer = DONE
        # A kept buffer has this rank's shard, with the edits that views have made; a read would overwrite them.
        if not holds:
            read = self._states.fetch(unit.layout, unit.shard_bytes(self.ranks.shard_rank))
        unit.come(self.ranks.all_gather(unit.flat(), read, unit.index))

    def follow_update(self, unit: Unit) -> None:
        """UPDATING → FETCHING: gather the other ranks' shards once the update has computed this rank's."""
        # After `computed` and not `done`: the buffer has the new parameters before the tiers have them.
        assert unit.update is not None
        unit.move(Residency.FETCHING)
        unit.come(self.ranks.all_gather(unit.flat(), unit.update.computed, unit.index))

    def arrive(self, unit: Unit) -> None:
        """FETCHING → RESIDENT: wait until the parameters have arrived. No-op for a resident unit."""
        if unit.residency is Residency.RESIDENT:
            return
        if unit.layout.dtype != torch.float32 or self.write_back.holds_back(unit):
            # Edited elements of 16-bit parameters are found by comparison with the tier, and edits of others may have
            # to stay out of it, so the write of the update must end before the user can edit the buffer.
            self.moves.await_update(unit.update)
        # The lane names the work that the model sleeps for: the update, while it still writes, or the gather.
        lane = "gather" if unit.update is None or unit.update.done.done() else "update"
        transfer = unit.take_transfer()
        assert transfer is not None
        unit.note_read(transfer)
        try:
            if transfer.done():  # on the host nothing is waited for, which needs no record
                self.device.await_copy(transfer)
            else:
                with self.moves.recorder.wait(lane, "parameters" if lane == "gather" else "update"):
                    self.device.await_copy(transfer)
        except BaseException:
            # The buffer is filled in part, so no view of it may be taken for the unit's values.
            self.drop(unit, valid=False)
            raise
        came = issued(transfer)
        if unit.fingerprint is None and isinstance(came, Fingerprinted):
            # It covers the whole buffer: shards of other ranks were not gathered.
            unit.note_fingerprint(came.fingerprint)
        # Before the parameters are bound: the lease may change its memory to the one that views refer to.
        if unit in self.kept:
            self._return_to_viewers(unit)
        self._land(unit)

    def _return_to_viewers(self, unit: Unit) -> None:
        """Copy the updated parameters, now fetched, into the buffer that was left to views, if views are alive.

        Raises LifetimeError if a view was edited since.
        """
        assert unit.lease is not None
        viewed = self.kept.is_viewed(unit)
        kept = self.kept.take(unit)
        # Two values of one parameter, the edit and the update, and no order between them: raise instead of choosing.
        if self.kept.is_edited(unit, kept):
            self.release(unit)
            raise edit_lost(unit)
        if viewed:
            kept.buffer[: unit.lease.nbytes].copy_(unit.lease.tensor)
            unit.lease.substitute(kept.buffer)

    def _land(self, unit: Unit) -> None:
        """Make the fetched parameters resident: FETCHING → RESIDENT."""
        unit.move(Residency.RESIDENT)
        # Tensors that autograd saves from the buffer find their unit by its storage [Note: saved references].
        binding.bind(unit)
        residents.add_buffer(unit)
        self.resident.add(unit)
        if unit.fingerprint is None:
            self.write_back.note_unedited(unit)

    def fetch_again(self, unit: Unit) -> None:
        """Replace edits of a resident unit by the values in its tier, which its views show then."""
        self.moves.await_update(unit.update)
        # In the order of an eviction, but without its write: the tier has the values of before the edit.
        self.leave(unit)
        self._detach(unit)
        self.drop(unit, valid=False)
        self.fetch(unit, holds=self.assign(unit, self.lease(unit)))
        self.arrive(unit)

    @property
    def is_complete(self) -> bool:
        """Return whether every unit has a buffer, so that nothing can be prefetched.

        Several ranks gather shards ahead, after an update in the buffer too.
        """
        return len(self.buffers) == len(self.units) and self.ranks.is_single

    def read_ahead(self) -> None:
        """Read the next units of the trace into memory, as far as the tier of parameters has buffers for that.

        Ranks may differ in this: it takes no buffer of the device, and nothing is exchanged.
        """
        if self._states.reads_ahead:
            kept, released = self.kept, Residency.RELEASED
            # Their parameters are in their tier alone, with no write of them due. None is under way: a unit is evicted
            # from its buffer after its writes, if the tier is not memory. An edit is written when it is collected.
            self._states.read_ahead(
                unit.layout
                for unit in map(self.units.__getitem__, self._schedule.trace.upcoming())
                if unit.residency is released
                and unit.due_update is None
                and unit not in kept
                and self.buffers.left_by(unit) is None
            )

    # -- eviction ----------------------------------------------------------------------------------------------------

    def release(self, unit: Unit) -> None:
        """Evict a unit with a buffer, and write edits back to its tier."""
        # The update writes from this buffer, and a transfer writes to it: neither may outlive the lease.
        self.moves.await_update(unit.take_update())
        if (transfer := unit.take_transfer()) is not None:
            with self.moves.recorder.wait("gather", "parameters"):
                transfer.wait()
        if unit.residency is Residency.RESIDENT:
            # Most evictions write nothing: the buffer has the bytes of the tier [Note: edits without a version].
            if self.write_back.was_edited(unit):
                self.write_back.write(unit)
            self.leave(unit)
            self._detach(unit)
        elif unit.is_dirty and unit.lease is not None:  # updated, and not used since
            self.write_back.write_shard(unit, unit.lease)
        self.drop(unit)

    def evict_ahead(self) -> None:
        """Start to evict the unit whose buffer the next fetch of the trace takes, on a device that compares late.

        Ranks agree on it: it depends on the trace and on which buffers were left, not on what has ended.
        """
        if self.device.host_addressable:
            return
        coming = map(self.units.__getitem__, self._schedule.trace.upcoming())
        unit = next((each for each in coming if each.residency is Residency.RELEASED), None)
        if unit is not None and self.buffers.is_short(unit):
            victim = next(self.buffers.later_than(unit), None)
            if victim is not None:
                self.evict(victim)

    def evict(self, unit: Unit) -> None:
        """Release the unit's buffer: → RELEASED. On a device, a later call completes it [Note: who waits for a
        fingerprint].
        """
        if unit.residency is Residency.RESIDENT and not self.device.host_addressable:
            self.moves.await_update(unit.take_update())
            binding.adopt_assigned(unit, self.moves.recorder)
            # Views may edit the buffer after the comparison, so they keep it.
            if not unit.is_viewed():
                check = self.write_back.start(unit)
                self.leave(unit)
                binding.unbind(unit)
                unit.move(Residency.RELEASED)
                self.buffers.leave(unit, check, None, in_backward=self.write_back.refuses)
                return
        self.release(unit)

    def _collect(self, leaving: Leaving) -> None:
        """Wait for the comparison of a buffer that its unit has left, write an edit, and release the buffer."""
        if leaving.check():
            if leaving.in_backward:
                self.write_back.refuse(leaving.unit)
            if leaving.update is None:
                self.write_back.write(leaving.unit, leaving.lease)
            else:
                self.moves.await_update(leaving.update)  # it reads the edit from the buffer
        self.buffers.release(leaving)

    def collect_left_by(self, unit: Unit, *, updated: bool = True) -> None:
        """Write an edit of the buffer that the unit has left, if its comparison finds one, and release the buffer.

        updated: also where an update takes the edit.
        """
        leaving = self.buffers.left_by(unit)
        if leaving is not None and (updated or leaving.update is None):
            self._collect(leaving)

    def leave(self, unit: Unit) -> None:
        """Unregister the buffer of a resident unit as its parameters' memory."""
        residents.remove_buffer(unit)
        self.resident.remove(unit)

    def _detach(self, unit: Unit) -> None:
        """Detach the parameters from the unit's buffer."""
        # autograd locates a view in its parameter by the layout of both, which a placeholder lacks.
        if unit.is_viewed():
            released.release(unit)
        else:
            binding.unbind(unit)

    def drop(self, unit: Unit, *, valid: bool = True) -> None:
        """Release the unit's buffer: → RELEASED. valid: the buffer holds the unit's present parameters."""
        assert unit.lease is not None
        unit.move(Residency.RELEASED)
        # Views are alive, so the memory is theirs, and the pool makes another buffer [Note: kept views].
        if unit.lease.is_referenced() and not self.buffers.in_place(unit):
            self.kept.keep(unit, self.buffers.take(unit), valid=valid)
            self.kept.warn(unit)
        else:
            self.buffers.take(unit).release()

    def write_kept(self, unit: Unit) -> None:
        """Write edits through views of a released unit to its tier, without other ranks.

        Raises LifetimeError if the unit has been overwritten since, so that the edit is lost.
        """
        if self.give(unit, self.lease(unit)):
            unit.move(Residency.FETCHING)
            assert unit.lease is not None
            self.write_back.write_shard(unit, unit.lease)
            unit.note_fingerprint(None)  # other ranks' shards may have changed too
            self.drop(unit)
        else:
            self.release(unit)

    def release_all(self) -> None:
        """Evict every unit and write edits back to its tier. No unit may be held."""
        with self.moves.moving():
            for leaving in self.buffers.all_leaving():
                self._collect(leaving)
            for unit in self.units:
                edited = self.kept.is_edited(unit)
                if unit.lease is not None:
                    self.release(unit)
                # An update in the tier alone leaves no buffer, but its write is still under way.
                else:
                    self.moves.await_update(unit.take_update())
                if edited:
                    self.write_kept(unit)

    def abandon(self) -> None:
        """Detach the parameters from the buffers without write-back, for an engine that closes after an error."""
        for unit in self.units:
            if unit.residency is Residency.RESIDENT:
                self.leave(unit)
            if unit.bound:
                binding.unbind(unit)
            residents.remove_parameters(unit)
        self.kept.clear()
