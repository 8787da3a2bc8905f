"""The runner: the object that hooks report to. It asks the schedule, and calls the executors.

A use of a unit comes from a module's hook, from a saved tensor that backward unpacks, or from a parameter that code
reads. Each ends here, in `Runner.use`. Nothing below the runner calls back: the schedule decides, and the store of
units moves bytes; it asks the schedule whose buffer to take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.comm.communicator import Communicator
from infinity.errors import UsageError
from infinity.model.saved import Scope
from infinity.plan.plan import Plan
from infinity.schedule.schedule import Schedule
from infinity.tiers.device import Device
from infinity.tiers.headroom import Pass, Planned, Use
from infinity.tiers.pool import Lease
from infinity.units import residents
from infinity.units.compiled import in_derivative, transformed
from infinity.units.edits import Edits
from infinity.units.store import UnitStore
from infinity.units.unit import Residency, Unit


class Runner:
    """Runs the units of an engine for inference. `TrainingRunner` adds gradients and updates.

    Any thread may call it, one at a time.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        store: UnitStore,
        scope: Scope,
        device: Device,
        ranks: Communicator,
    ) -> None:
        self.schedule = schedule
        self.store = store
        self.edits = Edits(store)
        self.scope = scope
        self.recorder = device.recorder
        self._device = device
        self._headroom = device.headroom(Planned.of(plan))
        self._ranks = ranks
        for unit in store.units:
            residents.add_parameters(unit, self)

    # -- reports of the model ----------------------------------------------------------------------------------------

    def use(self, unit: Unit) -> None:
        """Make the unit's parameters resident, and prefetch the units that follow in the trace.

        Raises UsageError if the present step has already updated them, since the previous values are overwritten.
        """
        if unit.updated_early:
            raise UsageError(
                f"unit {unit.name} is needed between backward and engine.step(), and its update during backward has "
                "overwritten the parameters of before. Call engine.step() first, or set infinity.update to "
                '"next_forward", which changes nothing before engine.step().'
            )
        if in_derivative():
            raise transformed(unit.name)
        self._device.follow_compute()
        news = self.schedule.used(unit.index)
        if news:
            self.recorder.unit(unit.name)
            if self._headroom.is_due():
                self._headroom.look(self._use_of(unit))
            self._pass_to(unit)
        store = self.store
        if unit.residency is Residency.RESIDENT and (not news or store.is_complete):
            return
        with store.moves.moving():
            if unit.residency is not Residency.RESIDENT:
                self._arrive(unit)
            self._prefetch()

    def _use_of(self, unit: Unit) -> Use:
        """Return the use of `unit` that has begun, for the watch of host memory."""
        if torch._C._current_graph_task_id() != -1:
            within = Pass.BACKWARD
        else:
            within = Pass.FORWARD if torch.is_grad_enabled() else Pass.WITHOUT_GRAPH
        return Use(unit.name, self.schedule.trace.cycle, within)

    def hold(self, unit: Unit) -> None:
        """Use the unit, and keep it in its buffer until `unhold`."""
        arrives = unit.residency is not Residency.RESIDENT
        self.use(unit)
        self.store.hold(unit, has_arrived=arrives)

    def unhold(self, unit: Unit) -> None:
        self.store.unhold(unit)

    def await_committed_write(self, unit: Unit) -> None:
        self.edits.await_committed_write(unit)

    def check_edit_in_backward(self, name: str) -> None:
        self.edits.check_in_backward(name)

    def _pass_to(self, unit: Unit) -> None:
        """The unit in use changes to `unit`."""

    # -- fetches -----------------------------------------------------------------------------------------------------

    def _arrive(self, unit: Unit) -> None:
        """Make a unit resident that is not. Waits until its parameters have arrived."""
        store = self.store
        if unit.residency is Residency.RELEASED:
            self._start(unit, store.lease(unit))
        if unit.residency is Residency.UPDATING:
            store.follow_update(unit)
        store.arrive(unit)

    def _start(self, unit: Unit, lease: Lease) -> None:
        """Start to fetch a released unit into a buffer."""
        self.store.fetch(unit, holds=self.store.assign(unit, lease))

    def prefetch(self) -> None:
        """Start to fetch the units that the trace uses next, as far as buffers suffice."""
        with self.store.moves.moving():
            self._prefetch()

    def _prefetch(self) -> None:
        store = self.store
        if store.is_complete:
            return
        for unit in map(store.units.__getitem__, self.schedule.ahead()):
            if unit.residency is Residency.UPDATING:
                store.follow_update(unit)
            elif unit.residency is Residency.RELEASED:
                lease = store.lease_ahead(unit)
                if lease is None:
                    break
                self._start(unit, lease)
        store.evict_ahead()
        store.read_ahead()

    def refresh_viewed(self) -> None:
        """Fetch units whose live views show old values, on all ranks. Collective.

        In a plain loop, views show new parameters as soon as a step, a load or an edit has ended.
        """
        past = self.store.showing_past()
        with self.store.moves.moving():
            for unit in past:
                if unit.residency is not Residency.RESIDENT:
                    self._arrive(unit)

    def discard_edits(self, units: Sequence[Unit]) -> list[Unit]:
        """Fetch held units again that any rank has edited since `Edits.hold_back`, and return these. Collective."""
        for unit in units:
            self.use(unit)  # an update in the meantime takes the parameters from their buffer
        return self.edits.discard(units)
