"""Decides when a user's edits of parameters reach their tiers: as the unit leaves its buffer, or before a commit.

Edits in a backward of several ranks are refused. Edits in a block that holds them back are discarded at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.comm.agreement.announcements import Operation
from infinity.errors import UsageError
from infinity.units.released import version_of
from infinity.units.store import UnitStore
from infinity.units.unit import Residency, Unit
from infinity.units.write_back import EDIT_LATER


class Edits:
    """Edits of the units of `store`. Any thread may call it, one at a time."""

    def __init__(self, store: UnitStore) -> None:
        self._store = store
        self._moves = store.moves
        self._write_back = store.write_back
        self._ranks = store.ranks
        self._commits_steps = False
        self._coded = [unit for unit in store.units if unit.layout.code is not None]
        self._versions: dict[int, int] = {}
        """Unit in a code → count of in-place edits of its parameters at the last `check_codes`."""

    def check_codes(self) -> None:
        """Raise UsageError, and stop the engine, if a resident unit in a code has edits that the code cannot hold.

        Called before a forward. Edits through `.data` are found as the unit leaves its buffer.
        """
        for unit in self._coded:
            # A unit may stay in its buffer for many steps, all of which would use the values. One that a block holds is
            # checked at the block's end.
            if unit.residency is not Residency.RESIDENT or unit.pin_count:
                continue
            # Comparing a fingerprint would read the buffer in each forward.
            version = sum(map(version_of, unit.parameters))
            if self._versions.get(unit.index) != version:
                with self._moves.moving():
                    if self._write_back.was_edited(unit):
                        self._write_back.check_code(unit)
                self._versions[unit.index] = version

    def write(self, units: Iterable[Unit] | None = None) -> None:
        """Write edits of `units`, by default of all whose edits are not held back, to their tiers. Units with a pending
        update are left out.

        Called where the states of a commit are read, and before edits that `discard` takes back.
        """
        store = self._store
        if units is None:
            units = [unit for unit in store.units if not self._write_back.holds_back(unit)]
        with self._moves.moving():
            for unit in units:
                # Also before an update that is due: its commit would wait for it, and the edit for the commit.
                store.collect_left_by(unit, updated=False)
                # The update takes edits with it, or has taken them.
                if unit.due_update is not None or unit.residency is Residency.UPDATING:
                    continue
                if unit.residency is Residency.RESIDENT and self._write_back.was_edited(unit):
                    self._moves.await_update(unit.update)
                    self._write_back.write(unit)
                elif unit.residency is Residency.RELEASED and store.kept.is_edited(unit):
                    store.write_kept(unit)

    # -- a backward --------------------------------------------------------------------------------------------------

    def check_in_backward(self, name: str) -> None:
        """Raise UsageError if several ranks share parameter `name`, which code in a backward is about to edit."""
        if not self._ranks.is_single:
            raise UsageError(
                f"parameter {name} was to be edited during backward, in which each of {self._ranks.size} ranks has "
                f"gradients of its own, so that their parameters would differ: nothing was changed. {EDIT_LATER}"
            )

    def begin_backward(self) -> None:
        """Find edits until the backward ends. Earlier edits are written to the tiers first."""
        self.write()
        self._write_back.refuse_edits(True)

    def end_backward(self) -> None:
        """Raise UsageError if a parameter was edited in the backward."""
        if self._write_back.refuses:
            for unit in self._store.units:
                self._store.collect_left_by(unit)
                if unit.residency is Residency.RESIDENT:
                    self._write_back.was_edited(unit)
                elif unit.residency is Residency.RELEASED and self._store.kept.is_edited(unit):
                    self._write_back.refuse(unit)
            self.forget_backward()

    def forget_backward(self) -> None:
        """Stop finding edits, after a backward that failed."""
        self._write_back.refuse_edits(False)

    # -- after a step ------------------------------------------------------------------------------------------------

    def commit_steps(self) -> None:
        """Keep edits that the script makes after a step out of the step's commit from now on."""
        self._commits_steps = True

    def await_committed_write(self, unit: Unit) -> None:
        """Wait until the update of a held unit is written, if a commit includes it: its write reads the buffer, which
        code outside of a forward is about to use and may edit.
        """
        if self._commits_steps and unit.update is not None:
            with self._moves.moving():
                self._moves.await_update(unit.update)

    # -- a block that holds edits back -------------------------------------------------------------------------------

    def hold_back(self, units: Sequence[Unit]) -> None:
        """Keep edits of held units out of their tiers from now on, for `discard`. Those of before are written."""
        self.write(units)
        self._store.await_updates(units)  # their writes read the buffers
        self._write_back.hold_back(units)

    def end_hold_back(self, units: Iterable[Unit]) -> None:
        self._write_back.end_hold_back(units)

    def check_held_back(self) -> None:
        """Raise UsageError if a unit has edits that are held back: states that are read now would hold them."""
        held_back = self._write_back.holds_back
        for unit in filter(held_back, self._store.units):
            if unit.residency is Residency.RESIDENT and self._write_back.was_edited(unit):
                raise UsageError(
                    f"parameters of unit {unit.name} were edited in a block of GatheredParameters without "
                    "modifier_rank, which discards the edits at its end. Save and read states after the block, or pass "
                    "modifier_rank=0."
                )

    def discard(self, units: Sequence[Unit]) -> list[Unit]:
        """Fetch resident units again that any rank has edited since `hold_back`, and return these. Collective.

        Views of the units show the fetched values.
        """
        edited = {unit.index for unit in units if self._write_back.was_edited(unit)}
        # The fetch below is a collective, so ranks without the edit have to join it.
        edited = self._ranks.union(edited, Operation.DISCARD_EDITS)
        discarded = [unit for unit in units if unit.index in edited]
        with self._moves.moving():
            for unit in discarded:
                if self._store.buffers.in_place(unit):
                    self._write_back.restore(unit)
                else:
                    self._store.fetch_again(unit)
        return discarded
