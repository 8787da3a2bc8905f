"""Compares the buffers of units with their tiers, and writes back the edits that are found.

Edits of parameters are found by fingerprints of the buffer, compared when the unit leaves it. PyTorch's version
counters would miss edits by `.data`, `.detach().numpy()` and custom kernels. A cache would call such a unit dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch

from infinity.comm.communicator import Communicator
from infinity.errors import UsageError
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Transfer
from infinity.units import binding
from infinity.units.states import UnitStates
from infinity.units.unit import Moves, Unit

EDIT_LATER = (
    "Let the engine's optimizer update the parameters. For a rule of your own, edit them between engine.backward() and "
    'engine.step() with infinity.get_full_grad(), which is averaged over ranks; set infinity.update to "next_forward".'
)


@dataclass(eq=False)
class EditCheck:
    """One comparison. Calling it waits for the device, and returns whether the unit was edited. Any thread may."""

    device: Device
    same: torch.Tensor | None
    """The result on the device, valid once `computed` is done; alive while it is copied."""
    flag: torch.Tensor
    """Its copy on the host, valid once `copied` is done."""
    computed: Transfer
    copied: Transfer

    def __call__(self) -> bool:
        # Two waits with two reasons: compute that was ahead of the check, then the copy of its result.
        recorder = self.device.recorder
        if not self.computed.done():
            with recorder.wait("compute", "edits"):
                self.computed.wait()
        with recorder.wait("device_to_host", "small copies"):
            self.copied.wait()
        self.same = None
        return not self.device.numbers(self.flag)[0]


class WriteBack:
    """Finds edits in the buffers of one engine's units, and writes them to the tiers. Moves no unit."""

    def __init__(
        self,
        states: UnitStates,
        device: Device,
        ranks: Communicator,
        moves: Moves,
        units: int,
        in_place: Collection[int],
    ) -> None:
        """units: number of units; at most one comparison of each is under way. in_place: units whose buffer is their
        extent.
        """
        self.refuses = False
        """True during a backward in which hooks may edit parameters through `.data` (several ranks only)."""
        self._states = states
        self._device = device
        self._ranks = ranks
        self._moves = moves
        self._units = units
        self._in_place = frozenset(in_place)
        self._held_back: set[int] = set()
        """Units whose edits stay out of their tiers."""
        self._before: dict[int, torch.Tensor] = {}
        """Copies of those in place, whose edits cannot stay out: uint8 (nbytes,), by index."""

    @cached_property
    def _flags(self) -> torch.Tensor:
        device = self._device
        return host_tensor(self._units) if device.host_addressable else device.host_buffer(self._units)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def start(self, unit: Unit) -> EditCheck:
        """Start to compare a resident unit's buffer, which nothing changes any more, with the unit's fingerprint."""
        assert unit.lease is not None
        flag = self._flags[unit.index : unit.index + 1]
        # Compared on the device: only one byte comes back, and the model's thread need not wait for it [Note: who
        # waits for a fingerprint].
        same = self._device.fingerprint(unit.lease.tensor) == unit.fingerprint
        if not isinstance(same, torch.Tensor):
            flag[0] = same
            return EditCheck(self._device, flag, flag, DONE, DONE)
        result = same.reshape(1).view(torch.uint8)
        computed = self._device.compute_reached()
        return EditCheck(self._device, result, flag, computed, self._device.copy_result(flag, result))

    def was_edited(self, unit: Unit) -> bool:
        """Copy assigned data into the buffer. Returns True if the resident unit's buffer then differs from its tier,
        since it was edited or is dirty.

        Raises UsageError, and stops the engine, if it was edited in a backward of several ranks.
        """
        binding.adopt_assigned(unit, self._moves.recorder)
        # An edit in place is in the tier already.
        if unit.index in self._in_place and unit.index not in self._before:
            return False
        if unit.is_dirty and not self.refuses:
            return True  # without a comparison: it is written in either case
        edited = self.start(unit)()
        # Each rank has gradients of its own in a backward, so the same hook edits differently on each.
        if edited and self.refuses:
            self.refuse(unit)
        return edited or unit.is_dirty

    def note_unedited(self, unit: Unit) -> None:
        """Record the bytes of a resident unit's buffer, which nobody has edited, to find edits from now on."""
        in_place = unit.index in self._in_place
        # Nobody asks for edits in place, or of a buffer that is written in either case.
        if (in_place and unit.index not in self._held_back) or (unit.is_dirty and not self.refuses):
            return
        assert unit.lease is not None
        unit.note_fingerprint(self._device.fingerprint(unit.lease.tensor))
        if in_place:
            self._before[unit.index] = unit.lease.tensor.clone()

    # -- edits that are refused or held back -------------------------------------------------------------------------

    def refuse_edits(self, refuses: bool) -> None:
        """Set whether an edit that is found is refused, from now on."""
        self.refuses = refuses

    def refuse(self, unit: Unit) -> NoReturn:
        """Stop the engine because of an edit in a backward."""
        self.refuses = False
        error = UsageError(
            f"parameters of unit {unit.name} were edited by a hook during backward, in which each of "
            f"{self._ranks.size} ranks has gradients of its own, so that their parameters would differ. Load the last "
            f"checkpoint. {EDIT_LATER}"
        )
        self._moves.fail(error)
        raise error

    def check_code(self, unit: Unit) -> None:
        """Raise UsageError, and stop the engine, if the buffer of a unit that is stored in a code has other values than
        the code can hold. All ranks raise it, before one of them writes its shard.
        """
        if unit.layout.code is not None:
            with self._refusing():
                self._states.check_code(unit.layout, unit.flat())

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Stop the engine on a refusal of an edit in the block."""
        try:
            yield
        except UsageError as error:
            self._moves.fail(error)
            raise

    def hold_back(self, units: Iterable[Unit]) -> None:
        """Keep edits of these held units out of their tiers, until `end_hold_back`."""
        self._held_back.update(unit.index for unit in units)
        with self._moves.moving():
            for unit in units:
                if unit.index in self._in_place:
                    self.note_unedited(unit)

    def end_hold_back(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._held_back.discard(unit.index)
            if self._before.pop(unit.index, None) is not None:
                unit.note_fingerprint(None)

    def holds_back(self, unit: Unit) -> bool:
        return unit.index in self._held_back

    def restore(self, unit: Unit) -> None:
        """Undo edits of a unit in place that are held back."""
        assert unit.lease is not None
        unit.lease.tensor.copy_(self._before[unit.index])

    # -- writes ------------------------------------------------------------------------------------------------------

    def write(self, unit: Unit, lease: Lease | None = None) -> None:
        """Write an edit of the unit's buffer, or of `lease`, which it has left, and note the fingerprint."""
        lease = lease or unit.lease
        assert lease is not None
        self.write_shard(unit, lease)
        unit.note_fingerprint(self._device.fingerprint(lease.tensor))

    def write_shard(self, unit: Unit, lease: Lease) -> None:
        """Write an edit of this rank's shard to its tier and its masters."""
        if unit.index in self._in_place:
            self.note_unedited(unit)  # the block that holds edits back keeps this one
            return
        # A background save reads these states, and must see those of the step that it saves.
        self._await_snapshot(unit)
        self._write(unit, lease, writes=True)

    def take(self, unit: Unit, *, later: bool, writes: bool) -> tuple[Callable[[], None] | None, EditCheck | None]:
        """Bring an edit of the buffer to the states that the next update starts from.

        writes: the edit must be in the tier of the parameters. later: nothing else uses the buffer before. On a device,
        returns the function that does so in the thread of the update, in place of the model's, and the comparison that
        it waits for [Note: who waits for a fingerprint].
        """
        # Data assigned to `.data` is an edit too, which the comparison below would not see outside of the buffer.
        binding.adopt_assigned(unit, self._moves.recorder)
        if self.refuses:
            self.was_edited(unit)
        if unit.layout.dtype == torch.float32 and not writes:
            return None, None  # the update starts from the buffer, and there is no other copy of the values
        assert unit.lease is not None
        lease, edited = unit.lease, self.start(unit)
        # On the host the comparison is done when it returns, so nothing is gained by another thread.
        later = later and not self._device.host_addressable

        def take() -> None:
            if edited():
                if not later:  # the job has waited for its gate; the present snapshot may be a commit that waits for it
                    self._await_snapshot(unit)
                self._write(unit, lease, writes=writes)  # an edited buffer is leased still

        if later:
            return take, edited
        take()
        return None, None

    def _write(self, unit: Unit, lease: Lease, *, writes: bool) -> None:
        """Write an edit of this rank's shard to its masters, and to the tier of the parameters if `writes`."""
        shard = unit.layout.shard_of(lease.tensor, self._ranks.shard_rank)
        with self._moves.recorder.wait("gather", "parameters"):
            self._states.sync_masters_from_edit(unit.layout, shard)
            if writes:
                with self._refusing():
                    self._states.write_back(unit.layout, shard).wait()
                unit.written()

    def _await_snapshot(self, unit: Unit) -> None:
        with self._refusing(), self._moves.recorder.wait("gather", "saves"):
            unit.snapshot_read.wait()
