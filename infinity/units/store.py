"""The unit store: fetches units into device buffers before use and evicts units by Belady's rule.

Device buffers are a fixed pool. A fetch takes a free buffer, or the buffer of the resident unit whose next use is
furthest away (Belady's rule over the recorded trace; least recently used while there is none). A unit is evicted only
when its buffer is needed, and never while a running forward holds it or a write of it is under way. Units with live
views are evicted last. Their buffer is kept, and the unit is fetched into it again, so that views show its values
(`infinity.units.kept`).

The store finds edits of parameters by fingerprints of the buffer, compared when the unit leaves it. PyTorch's version
counters would miss edits by `.data`, `.detach().numpy()` and custom kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NoReturn

import torch

from infinity.comm.agreement.announcements import Operation
from infinity.comm.communicator import Communicator
from infinity.errors import RanksError, UsageError
from infinity.interrupts import ForcedInterrupt, uninterrupted
from infinity.schedule.schedule import Schedule
from infinity.tiers.device import Device
from infinity.tiers.digests import Fingerprint
from infinity.tiers.pool import Lease, Pool
from infinity.tiers.transfer import DONE, Fingerprinted, Together, Transfer
from infinity.units import binding, released, residents
from infinity.units.buffers import Leaving, UnitBuffers
from infinity.units.compiled import outside_modes
from infinity.units.kept import EditCheck, EditChecks, KeptBuffers, edit_lost
from infinity.units.states import UnitStates
from infinity.units.unit import Residency, Unit
from infinity.update.job import PlacedUpdate, UpdateJob, UpdateProgress

_EDIT_LATER = (
    "Let the engine's optimizer update the parameters. For a rule of your own, edit them between engine.backward() and "
    'engine.step() with infinity.get_full_grad(), which is averaged over ranks; set infinity.update to "next_forward".'
)


class _Moving(AbstractContextManager[None]):
    """See `UnitStore.moving`. A class, since a generator takes three times as long, once a unit."""

    __slots__ = ("_modes", "_store", "_uninterrupted")

    def __init__(self, store: UnitStore) -> None:
        self._store, self._uninterrupted = store, uninterrupted()

    def __enter__(self) -> None:
        self._uninterrupted.__enter__()
        try:
            self._modes = outside_modes()
            self._modes.__enter__()
        except BaseException:
            self._uninterrupted.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.stop(error)
        try:
            self._modes.__exit__(kind, error, trace)
        finally:
            self._uninterrupted.__exit__(kind, error, trace)


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
        in_tier: Collection[int],
        in_place: Collection[int] = (),
    ) -> None:
        """pool: device buffers. in_tier: units whose update begins from their parameters in their tier, not from those
        in their buffer. in_place: units whose buffer is their extent.
        """
        self.units = list(units)
        self.resident = binding.ResidentUnits()
        self.fetches = 0
        self.kept = KeptBuffers(pool, device)
        self._edits = EditChecks(device, len(units))
        self.buffers = UnitBuffers(self.units, pool, schedule, {i: states.in_place(units[i].layout) for i in in_place})
        self.failure: OSError | ForcedInterrupt | RanksError | UsageError | None = None
        """Error of a failed transfer. Data did not arrive, so the engine must not continue from this state."""
        self._held_back: set[int] = set()
        """Units whose edits stay out of their tiers until `discard_edits`."""
        self._before: dict[int, torch.Tensor] = {}
        """Copies of those in place, whose edits cannot stay out: uint8 (nbytes,), by index."""
        self._commits_steps = False
        self._finds_edits = False
        """True during a backward in which hooks may edit parameters through `.data` (several ranks only)."""
        self._schedule = schedule
        self._in_tier = frozenset(in_tier)
        self._states = states
        self._device = device
        self.recorder = device.recorder
        self._ranks = ranks

    def hold(self, unit: Unit, *, has_arrived: bool) -> None:
        """Keep a resident unit in its buffer until `unhold`. has_arrived: just now, so nobody has assigned data yet."""
        if not unit.pin_count:
            # Now, so that a checkpoint's recomputation sees the same tensors.
            if not has_arrived:
                binding.adopt_assigned(unit, self.recorder)
            unit.check_frozen()
        unit.pin()

    def unhold(self, unit: Unit) -> None:
        unit.unpin()
        if not unit.pin_count and self.buffers.exceed(unit):
            with self.moving():
                self._release(unit)

    def is_viewed(self, unit: Unit) -> bool:
        """Return whether anything but its parameters refers to a resident unit's buffer, once no update writes it."""
        if unit.update is not None and not unit.update.done.done():
            with self.moving():
                self.await_update(unit.update)  # its write refers to the buffer too, which would count as a view
        return unit.is_viewed()

    def await_update(self, update: UpdateProgress | None) -> None:
        """Wait until an update is written. No-op for None."""
        if update is not None:
            if update.done.done():
                update.done.wait()  # raises its error
                return
            with self.recorder.wait("update", "update"):
                update.done.wait()

    def moving(self) -> AbstractContextManager[None]:
        """Move units in the block: an error there stops the engine, and Ctrl-C waits for the end of the block."""
        return _Moving(self)

    def stop(self, error: BaseException | None) -> None:
        """Stop the engine after an error of a transfer. No-op for others."""
        if isinstance(error, OSError | ForcedInterrupt | RanksError):
            self.failure = error

    # -- edits in backward ---------------------------------------------------------------------------------------------

    def check_edit_in_backward(self, name: str) -> None:
        """Raise UsageError if several ranks share parameter `name`, which code in a backward is about to edit."""
        if not self._ranks.is_single:
            raise UsageError(
                f"parameter {name} was to be edited during backward, in which each of {self._ranks.size} ranks has "
                f"gradients of its own, so that their parameters would differ: nothing was changed. {_EDIT_LATER}"
            )

    def begin_backward(self) -> None:
        """Find edits until the backward ends. Earlier edits are written to the tiers first."""
        self.write_edits()
        self._finds_edits = True

    def end_backward(self) -> None:
        """Raise UsageError if a parameter was edited in the backward."""
        if self._finds_edits:
            for unit in self.units:
                self._collect_left_by(unit)
                if unit.residency is Residency.RESIDENT:
                    self._was_edited(unit)
                elif unit.residency is Residency.RELEASED and self.kept.is_edited(unit):
                    self._refuse_edit(unit)
            self._finds_edits = False

    def _refuse_edit(self, unit: Unit) -> NoReturn:
        self._finds_edits = False
        self.failure = UsageError(
            f"parameters of unit {unit.name} were edited by a hook during backward, in which each of "
            f"{self._ranks.size} ranks has gradients of its own, so that their parameters would differ. Load the last "
            f"checkpoint. {_EDIT_LATER}"
        )
        raise self.failure

    def forget_backward(self) -> None:
        """Stop finding edits, after a backward that failed."""
        self._finds_edits = False

    # -- fetch -------------------------------------------------------------------------------------------------------

    def lease(self, unit: Unit) -> Lease:
        """Return a buffer for a released unit that is needed now. Waits for updates and premature prefetches."""
        # A free buffer costs no eviction, so it comes before any victim [Note: why eviction follows Belady].
        lease = self._free(unit)
        if lease is not None:
            return lease
        for victim in self.buffers.by_cost(unit):
            self._release(victim)
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
        if unit.update is not None and not unit.update.done.done() and self._ranks.is_single:
            return None  # its update is under way in the tier alone
        lease = self._free(unit)
        if lease is not None:
            return lease
        # One victim is enough, since buffers of a size class are interchangeable.
        for victim in self.buffers.later_than(unit):
            self._release(victim)
            return self.buffers.free(unit)
        return None

    def _free(self, unit: Unit) -> Lease | None:
        """Return a buffer that is free, or that a unit has left: its comparison is collected first."""
        # A free one first, so that a comparison is collected as late as possible.
        lease = self.buffers.free(unit)
        while lease is None and (leaving := self.buffers.leaving(unit)) is not None:
            self._collect(leaving)
            lease = self.buffers.free(unit)  # None: an extra buffer was freed instead
        return lease

    def evict_ahead(self) -> None:
        """Start to evict the unit whose buffer the next fetch of the trace takes, on a device that compares late.

        Ranks agree on it: it depends on the trace and on which buffers were left, not on what has ended.
        """
        if self._device.host_addressable:
            return
        coming = map(self.units.__getitem__, self._schedule.trace.upcoming())
        unit = next((each for each in coming if each.residency is Residency.RELEASED), None)
        if unit is not None and self.buffers.is_short(unit):
            for victim in self.buffers.later_than(unit):
                self._evict(victim)
                return

    def assign(self, unit: Unit, lease: Lease) -> bool:
        """Assign a buffer to a released unit, before its fetch or its update.

        Returns True if the buffer already holds this rank's shard. An unsharded unit may be resident at once.
        """
        holds = False
        self._collect_left_by(unit)  # its edit belongs in the tier, which is read next
        if unit.updated_early:  # backward may still read a buffer that was left to views: `_return_to_viewers`
            self.buffers.give(unit, lease)
        else:
            holds = self._give(unit, lease)
        self.fetches += not self.buffers.in_place(unit)
        return holds

    def fetch(self, unit: Unit, *, holds: bool) -> None:
        """RELEASED → FETCHING. holds: as returned by `assign`."""
        # `assign` has bound the unit to its kept buffer, which holds every shard.
        if unit.residency is Residency.RESIDENT:
            return
        unit.move(Residency.FETCHING)
        self.await_update(unit.update)  # an update in the tier alone
        read: Transfer = DONE
        # A kept buffer has this rank's shard, with the edits that views have made; a read would overwrite them.
        if not holds:
            read = self._states.fetch(unit.layout, unit.shard_bytes(self._ranks.shard_rank))
        unit.come(self._ranks.all_gather(unit.flat(), read, unit.index))

    def follow_update(self, unit: Unit) -> None:
        """UPDATING → FETCHING: gather the other ranks' shards once the update has computed this rank's."""
        # After `computed` and not `done`: the buffer has the new parameters before the tiers have them.
        assert unit.update is not None
        unit.move(Residency.FETCHING)
        unit.come(self._ranks.all_gather(unit.flat(), unit.update.computed, unit.index))

    def arrive(self, unit: Unit) -> None:
        """FETCHING → RESIDENT: wait until the parameters have arrived. No-op for a resident unit."""
        if unit.residency is Residency.RESIDENT:
            return
        if unit.layout.dtype != torch.float32 or unit.index in self._held_back:
            # Edited elements of 16-bit parameters are found by comparison with the tier, and edits of others may have
            # to stay out of it, so the write of the update must end before the user can edit the buffer.
            self.await_update(unit.update)
        # The lane names the work that the model sleeps for: the update, while it still writes, or the gather.
        lane = "gather" if unit.update is None or unit.update.done.done() else "update"
        transfer = unit.take_transfer()
        assert transfer is not None
        unit.note_read(transfer)
        try:
            if transfer.done():  # on the host nothing is waited for, which needs no record
                self._device.await_copy(transfer)
            else:
                with self.recorder.wait(lane, "parameters" if lane == "gather" else "update"):
                    self._device.await_copy(transfer)
        except BaseException:
            # The buffer is filled in part, so no view of it may be taken for the unit's values.
            self._drop(unit, valid=False)
            raise
        if unit.fingerprint is None and isinstance(transfer, Fingerprinted):
            # It covers the whole buffer: shards of other ranks were not gathered.
            unit.note_fingerprint(transfer.fingerprint)
        # Before the parameters are bound: the lease may change its memory to the one that views refer to.
        if unit in self.kept:
            self._return_to_viewers(unit)
        self._land(unit)

    def _land(self, unit: Unit) -> None:
        """Make the fetched parameters resident: FETCHING → RESIDENT."""
        unit.move(Residency.RESIDENT)
        # Tensors that autograd saves from the buffer find their unit by its storage [Note: saved references].
        binding.bind(unit)
        residents.add_buffer(unit)
        self.resident.add(unit)
        if unit.fingerprint is None:
            self._note_unedited(unit)

    @property
    def is_complete(self) -> bool:
        """Return whether every unit has a buffer, so that nothing can be prefetched.

        Several ranks gather shards ahead, after an update in the buffer too.
        """
        return len(self.buffers) == len(self.units) and self._ranks.is_single

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

    # -- update ------------------------------------------------------------------------------------------------------

    def place(self, unit: Unit, job: UpdateJob) -> PlacedUpdate:
        """→ UPDATING: hand this rank's shard of the leased buffer to an update. `leave_if_unused` follows.

        The buffer holds the parameters, is being filled with them, or, for a RELEASED unit, is filled by the update.
        """
        assert unit.lease is not None
        # Kernels of the model that were issued before may still read the buffer that the update writes.
        reached = self._device.compute_reached()
        arrives: Transfer | None = None
        early, viewed, leaves = job.gradient is not None, False, False
        prepare: Callable[[], None] | None = None
        check: EditCheck | None = None
        if unit.residency is Residency.RESIDENT:
            arrives = reached
            viewed = unit.is_viewed()
            if viewed and early and unit.update is not None:
                with self.moving():
                    self.await_update(unit.update)  # its write refers to the buffer too
                viewed = unit.is_viewed()
            # Views may show the past until the unit is fetched into this buffer again [Note: kept views].
            if viewed:
                self.kept.note_overwritten(unit)
            prepare, check = self._take_edit(unit, later=not viewed, is_draft=job.draft is not None)
            self._leave(unit)
            leaves = early and self._is_rewritten_in_tier_only(unit)
            # Backward may still read through a view, so an early update gets a copy in another buffer.
            if early and viewed and not leaves:
                arrives = self._leave_to_viewers(unit)
        elif unit.residency is Residency.FETCHING:
            arrives = unit.take_transfer()
            # A prefetched unit: the update waits for its fetch in place of reading the parameters again.
            unit.note_read(arrives or DONE)
        if unit.lease.is_substituted:
            self.kept.note_overwritten(unit)
        # Views stay attached to the buffer, so the parameters change their type and keep their memory.
        if self.kept.is_overwritten(unit):
            released.release(unit.parameters)
        else:
            binding.unbind(unit)
        unit.move(Residency.UPDATING)
        after: Transfer = job.gate
        if unit.update is not None:
            # A gate that is done may have failed, and its error has to be raised.
            after = unit.update.done if job.gate is DONE else Together(job.gate, unit.update.done)
        fetched = unit.fetched
        unit.note_read(DONE)
        unit.begin_update(job.progress, early=early)
        # A buffer that is released at once gets no copy of the result: the next fetch reads the tier.
        target = None if leaves else unit.shard_bytes(self._ranks.shard_rank)
        if leaves and check is not None:
            unit.move(Residency.RELEASED)
            self.buffers.leave(unit, check, job.progress, in_backward=False)
        checked = DONE if check is None else check.copied
        return PlacedUpdate(job, target, arrives, reached, fetched, after, prepare, checked)

    def leave_if_unused(self, unit: Unit, *, in_tier_alone: bool) -> None:
        """Release the buffer of a unit whose submitted update does not use it. Warnings come last: they may raise."""
        if in_tier_alone:
            if unit.lease is not None:  # else it is compared first
                self._drop(unit, valid=False)
        elif unit in self.kept:
            self.kept.warn(unit)

    def release_passed(self, unit: Unit) -> None:
        """Release the buffer of a unit past its last use that may not be updated here, if other ranks may update it in
        its tier alone.

        References may differ between ranks; the buffers that are free may not, since they decide what is fetched next.
        """
        if self._is_rewritten_in_tier_only(unit):
            with self.moving():
                self._evict(unit)

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
                self._drop(unit, valid=False)

    def _take_edit(
        self, unit: Unit, *, later: bool, is_draft: bool
    ) -> tuple[Callable[[], None] | None, EditCheck | None]:
        """Bring an edit of the buffer to the states that the next update starts from.

        is_draft: the edit must be in the tiers, since the draft may be taken back. later: nothing else uses the buffer
        before. On a device, returns the function that does so in the thread of the update, in place of the model's, and
        the comparison that it waits for [Note: who waits for a fingerprint].
        """
        # Data assigned to `.data` is an edit too, which the comparison below would not see outside of the buffer.
        binding.adopt_assigned(unit, self.recorder)
        if self._finds_edits:
            self._was_edited(unit)
        in_tier = unit.index in self._in_tier
        is_written = in_tier or is_draft
        if unit.layout.dtype == torch.float32 and not is_written:
            return None, None  # the update starts from the buffer, and there is no other copy of the values
        assert unit.lease is not None
        layout, lease, edited = unit.layout, unit.lease, self._edits.start(unit)
        # On the host the comparison is done when it returns, so nothing is gained by another thread.
        later = later and not self._device.host_addressable

        def take() -> None:
            if edited():
                if not later:  # the job has waited for its gate; the present snapshot may be a commit that waits for it
                    self._await_snapshot(unit)
                shard = layout.shard_of(lease.tensor, self._ranks.shard_rank)  # here: an edited buffer is leased still
                with self.recorder.wait("gather", "parameters"):
                    self._states.sync_masters_from_edit(layout, shard)
                    if is_written:
                        self._states.write_back(layout, shard).wait()

        if later:
            return take, edited
        take()
        return None, None

    def _is_rewritten_in_tier_only(self, unit: Unit) -> bool:
        """Return whether the unit's buffer is released as its update starts, so that nothing is copied into it.

        Follows from the plan and the trace, which ranks share.
        """
        return unit.index in self._in_tier and self.buffers.leaves_first(unit)

    def _leave_to_viewers(self, unit: Unit) -> Transfer:
        """Leave the buffer to its views, which backward may read until the step ends.

        Returns the transfer that copies the parameters into a fresh buffer, for the update.
        """
        assert unit.lease is not None
        kept = self.kept.keep(unit, unit.lease)
        lease = self.buffers.exchange(unit)
        return self._device.copy(lease.tensor, kept.buffer[: lease.nbytes])

    def _return_to_viewers(self, unit: Unit) -> None:
        """Copy the updated parameters, now fetched, into the buffer that was left to views, if views are alive.

        Raises LifetimeError if a view was edited since.
        """
        assert unit.lease is not None
        viewed = self.kept.is_viewed(unit)
        kept = self.kept.take(unit)
        # Two values of one parameter, the edit and the update, and no order between them: raise instead of choosing.
        if self.kept.is_edited(unit, kept):
            self._release(unit)
            raise edit_lost(unit)
        if viewed:
            kept.buffer[: unit.lease.nbytes].copy_(unit.lease.tensor)
            unit.lease.substitute(kept.buffer)

    def assign_for_update(self, unit: Unit) -> None:
        """Assign a buffer to a released unit, for an update that fills it."""
        self._collect_left_by(unit)
        self._give(unit, self.lease(unit))

    def commit_steps(self) -> None:
        """Keep edits that the script makes after a step out of the step's commit from now on."""
        self._commits_steps = True

    def await_committed_write(self, unit: Unit) -> None:
        """Wait until the update of a held unit is written, if a commit includes it: its write reads the buffer, which
        code outside of a forward is about to use and may edit.
        """
        if self._commits_steps and unit.update is not None:
            with self.moving():
                self.await_update(unit.update)

    def hold_back_edits(self, units: Sequence[Unit]) -> None:
        """Keep edits of held units out of their tiers from now on, for `discard_edits`. Those of before are written."""
        self.write_edits(units)
        self.await_updates(units)  # their writes read the buffers
        self._held_back.update(unit.index for unit in units)
        with self.moving():
            for unit in filter(self.buffers.in_place, units):
                self._note_unedited(unit)

    def release_edits(self, units: Iterable[Unit]) -> None:
        """End `hold_back_edits`."""
        for unit in units:
            self._held_back.discard(unit.index)
            if self._before.pop(unit.index, None) is not None:
                unit.note_fingerprint(None)

    def check_held_back(self) -> None:
        """Raise UsageError if a unit has edits that are held back: states that are read now would hold them."""
        for unit in self.units:
            if unit.index in self._held_back and unit.residency is Residency.RESIDENT and self._was_edited(unit):
                raise UsageError(
                    f"parameters of unit {unit.name} were edited in a block of GatheredParameters without "
                    "modifier_rank, which discards the edits at its end. Save and read states after the block, or pass "
                    "modifier_rank=0."
                )

    def discard_edits(self, units: Sequence[Unit]) -> list[Unit]:
        """Fetch resident units again that any rank has edited since `hold_back_edits`, and return these. Collective.

        Views of the units show the fetched values.
        """
        edited = {unit.index for unit in units if self._was_edited(unit)}
        # The fetch below is a collective, so ranks without the edit have to join it.
        edited = self._ranks.union(edited, Operation.DISCARD_EDITS)
        discarded = [unit for unit in units if unit.index in edited]
        with self.moving():
            for unit in discarded:
                if self.buffers.in_place(unit):
                    assert unit.lease is not None
                    unit.lease.tensor.copy_(self._before[unit.index])
                    continue
                self.await_update(unit.update)
                # In the order of an eviction, but without its write: the tier has the values of before the edit.
                self._leave(unit)
                self._detach(unit)
                self._drop(unit, valid=False)
                self.fetch(unit, holds=self.assign(unit, self.lease(unit)))
                self.arrive(unit)
        return discarded

    def write_edits(self, units: Iterable[Unit] | None = None) -> None:
        """Write edits of `units`, by default of all whose edits are not held back, to their tiers. Units with a pending
        update are left out.

        Called where the states of a commit are read, and before edits that `discard_edits` takes back.
        """
        if units is None:
            units = [unit for unit in self.units if unit.index not in self._held_back]
        with self.moving():
            for unit in units:
                # Also before an update that is due: its commit would wait for it, and the edit for the commit.
                self._collect_left_by(unit, updated=False)
                # The update takes edits with it, or has taken them.
                if unit.due_update is not None or unit.residency is Residency.UPDATING:
                    continue
                if unit.residency is Residency.RESIDENT and self._was_edited(unit):
                    self.await_update(unit.update)
                    self._write_edit(unit)
                elif unit.residency is Residency.RELEASED and self.kept.is_edited(unit):
                    self._write_kept(unit)

    def await_updates(self, units: Iterable[Unit] | None = None) -> None:
        """Wait until the updates of `units`, by default of all, that were started are written back."""
        with self.moving():
            for unit in self.units if units is None else units:
                self.await_update(unit.update)

    def rewritten(self, unit: Unit) -> None:
        """Invalidate saved references and the fingerprint: a load or a write to the tiers overwrote the parameters."""
        unit.overwritten()
        torch.autograd.graph.increment_version(unit.parameters)

    def end_step(self) -> None:
        """End the step: parameters that were updated early may be read again."""
        for unit in self.units:
            unit.end_step()

    def showing_past(self) -> list[Unit]:
        """Return the units whose live views show old values on any rank. Collective."""
        past = {unit.index for unit in self.units if self.kept.shows_past(unit)}
        self.kept.forget_overwritten()
        # The fetches that follow are collectives, and ranks may hold different views.
        past = self._ranks.union(past)
        return [self.units[index] for index in sorted(past)]

    # -- release -----------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Evict every unit and write edits back to its tier. No unit may be held."""
        with self.moving():
            for leaving in self.buffers.all_leaving():
                self._collect(leaving)
            for unit in self.units:
                edited = self.kept.is_edited(unit)
                if unit.lease is not None:
                    self._release(unit)
                # An update in the tier alone leaves no buffer, but its write is still under way.
                else:
                    self.await_update(unit.take_update())
                if edited:
                    self._write_kept(unit)

    def abandon(self) -> None:
        """Detach the parameters from the buffers without write-back, for an engine that closes after an error."""
        for unit in self.units:
            if unit.residency is Residency.RESIDENT:
                self._leave(unit)
            if unit.bound:
                binding.unbind(unit)
            residents.remove_parameters(unit)
        self.kept.clear()

    def release(self, unit: Unit) -> None:
        """Evict a unit, if it has a buffer, and write edits back to its tier."""
        if unit.lease is not None:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        # The update writes from this buffer, and a transfer writes to it: neither may outlive the lease.
        self.await_update(unit.take_update())
        if (transfer := unit.take_transfer()) is not None:
            with self.recorder.wait("gather", "parameters"):
                transfer.wait()
        if unit.residency is Residency.RESIDENT:
            # Most evictions write nothing: the buffer has the bytes of the tier [Note: edits without a version].
            if self._was_edited(unit):
                self._write_edit(unit)
            self._leave(unit)
            self._detach(unit)
        self._drop(unit)

    def _evict(self, unit: Unit) -> None:
        """Release the unit's buffer: → RELEASED. On a device, `_collect` completes it [Note: who waits for a
        fingerprint].
        """
        if unit.residency is Residency.RESIDENT and not self._device.host_addressable:
            self.await_update(unit.take_update())
            binding.adopt_assigned(unit, self.recorder)
            # Views may edit the buffer after the comparison, so they keep it.
            if not unit.is_viewed():
                check = self._edits.start(unit)
                self._leave(unit)
                binding.unbind(unit)
                unit.move(Residency.RELEASED)
                self.buffers.leave(unit, check, None, in_backward=self._finds_edits)
                return
        self._release(unit)

    def _collect(self, leaving: Leaving) -> None:
        """Wait for the comparison of a buffer that its unit has left, write an edit, and release the buffer."""
        if leaving.check():
            if leaving.in_backward:
                self._refuse_edit(leaving.unit)
            if leaving.update is None:
                self._write_edit(leaving.unit, leaving.lease)
            else:
                self.await_update(leaving.update)  # it reads the edit from the buffer
        self.buffers.release(leaving)

    def _collect_left_by(self, unit: Unit, *, updated: bool = True) -> None:
        """Collect the comparison of the buffer that the unit has left, if any. updated: also where an update takes the
        edit.
        """
        leaving = self.buffers.left_by(unit)
        if leaving is not None and (updated or leaving.update is None):
            self._collect(leaving)

    def _detach(self, unit: Unit) -> None:
        """Detach the parameters from the unit's buffer."""
        # autograd locates a view in its parameter by the layout of both, which a placeholder lacks.
        if unit.is_viewed():
            released.release(unit.parameters)
        else:
            binding.unbind(unit)

    def _drop(self, unit: Unit, *, valid: bool = True) -> None:
        """Release the unit's buffer: → RELEASED. valid: the buffer holds the unit's present parameters."""
        assert unit.lease is not None
        unit.move(Residency.RELEASED)
        # Views are alive, so the memory is theirs, and the pool makes another buffer [Note: kept views].
        if unit.lease.is_referenced() and not self.buffers.in_place(unit):
            self.kept.keep(unit, self.buffers.take(unit), valid=valid)
            self.kept.warn(unit)
        else:
            self.buffers.take(unit).release()

    def _give(self, unit: Unit, lease: Lease) -> bool:
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
        if present and self._ranks.shards == 1:
            unit.move(Residency.FETCHING)
            self._land(unit)
        elif present and unit.due_update is None:
            return True
        elif self.kept.is_edited(unit, kept):
            self.buffers.take(unit).release()
            raise edit_lost(unit)
        return False

    def _write_kept(self, unit: Unit) -> None:
        """Write edits through views of a released unit to its tier, without other ranks.

        Raises LifetimeError if the unit has been overwritten since, so that the edit is lost.
        """
        if self._give(unit, self.lease(unit)):
            unit.move(Residency.FETCHING)
            assert unit.lease is not None
            self._write_back(unit, unit.lease)
            unit.note_fingerprint(None)  # other ranks' shards may have changed too
            self._drop(unit)
        else:
            self._release(unit)

    def _leave(self, unit: Unit) -> None:
        """Unregister the buffer of a resident unit as its parameters' memory."""
        residents.remove_buffer(unit)
        self.resident.remove(unit)

    def _was_edited(self, unit: Unit) -> bool:
        """Copy assigned data into the buffer. Returns True if the resident unit's buffer then differs from its tier.

        Raises UsageError, and stops the engine, if it was edited in a backward of several ranks.
        """
        binding.adopt_assigned(unit, self.recorder)
        # An edit in place is in the tier already.
        if self.buffers.in_place(unit) and unit.index not in self._before:
            return False
        edited = self._edits.start(unit)()
        # Each rank has gradients of its own in a backward, so the same hook edits differently on each.
        if edited and self._finds_edits:
            self._refuse_edit(unit)
        return edited

    def _note_unedited(self, unit: Unit) -> None:
        """Record that a resident unit's buffer has the bytes of its tier, to find edits from now on."""
        in_place = self.buffers.in_place(unit)
        if in_place and unit.index not in self._held_back:
            return
        unit.note_fingerprint(self._fingerprint(unit))
        if in_place:
            assert unit.lease is not None
            self._before[unit.index] = unit.lease.tensor.clone()

    def _fingerprint(self, unit: Unit) -> Fingerprint:
        assert unit.lease is not None
        return self._device.fingerprint(unit.lease.tensor)

    def _await_snapshot(self, unit: Unit) -> None:
        try:
            with self.recorder.wait("gather", "saves"):
                unit.snapshot_read.wait()
        except UsageError as error:
            self.failure = error  # the edit can be written to no tier
            raise

    def _write_edit(self, unit: Unit, lease: Lease | None = None) -> None:
        """Write an edit of the unit's buffer, or of `lease`, which it has left, and note the fingerprint."""
        lease = lease or unit.lease
        assert lease is not None
        self._write_back(unit, lease)
        unit.note_fingerprint(self._device.fingerprint(lease.tensor))

    def _write_back(self, unit: Unit, lease: Lease) -> None:
        """Write an edit of this rank's shard to its tier and its masters."""
        if self.buffers.in_place(unit):
            self._note_unedited(unit)  # the block that holds edits back keeps this one
            return
        # A background save reads these states, and must see those of the step that it saves.
        self._await_snapshot(unit)
        shard = unit.layout.shard_of(lease.tensor, self._ranks.shard_rank)
        with self.recorder.wait("gather", "parameters"):
            self._states.sync_masters_from_edit(unit.layout, shard)
            self._states.write_back(unit.layout, shard).wait()
