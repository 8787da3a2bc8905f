"""Creates the jobs that update units, and starts them during backward or prepares for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from infinity.comm.communicator import Communicator
from infinity.engine.loss_check import LossCheck
from infinity.grads.store import GradStore
from infinity.rules import Hyper
from infinity.schedule.step import Step
from infinity.units.store import UnitStore
from infinity.units.unit import Unit
from infinity.update.job import Gradient, UpdateJob


class Updater:
    """Creates the updates of one engine's units."""

    def __init__(
        self,
        store: UnitStore,
        gradients: GradStore,
        ranks: Communicator,
        step: Step,
        early_scale: float,
        *,
        in_forward: Collection[int],
        check_nan: bool,
    ) -> None:
        """early_scale: factor of gradients, summed over ranks, in updates during backward. in_forward: units that are
        not updated there. check_nan: skip units with non-finite gradients there.
        """
        self.hypers: Sequence[Hyper] = ()
        """Hyper-parameters of the jobs that are created next, one entry per param_group."""
        self._store = store
        self._gradients = gradients
        self._ranks = ranks
        self._step = step
        self._early_scale = early_scale
        self._in_forward = in_forward
        self._check_nan = check_nan
        self._loss_check: LossCheck | None = None
        """The check of the running backward's loss, for which its updates wait; None: the loss is finite."""

    @contextmanager
    def checking(self, check: LossCheck) -> Iterator[None]:
        """Let the updates of the backward in the block wait for `check`, which has its result at the end."""
        self._loss_check = check
        try:
            yield
        finally:
            self._loss_check = None

    def job(self, unit: Unit, scale: float, gradient: Future[Gradient] | None) -> UpdateJob:
        """Return the job that updates `unit` in this step. gradient: None to read it from its tier."""
        slots, rank = self._gradients.slots, self._ranks.shard_rank
        return UpdateJob(
            unit.layout,
            lambda: unit.layout.runs(rank, unit.advance(slots[unit.index])),
            self.hypers,
            scale,
            unit.layout.first + unit.layout.shard_range(rank)[0],
            gradient,
            require_finite=gradient is not None and self._check_nan,
            allowed=None if gradient is None or self._loss_check is None else self._loss_check.passed,
            gate=unit.snapshot_read,
        )

    def count_edits(self) -> None:
        """Increment the versions of the parameters of `Step.updated`, since the step counts as an edit of them.

        Called once a step, as a torch optimizer does, and not at each update: parameters may share a version, as slices
        of one tensor do, and the running backward still needs the others. PyTorch's own check then refuses graphs from
        before the step. On several ranks all parameters of a unit count, since gradients may come from other ranks.
        """
        for unit in map(self._store.units.__getitem__, self._step.updated):
            slots = unit.collected if self._ranks.is_single else range(len(unit.parameters))
            torch.autograd.graph.increment_version([unit.parameters[slot] for slot in slots])

    def can_update_now(self, unit: Unit) -> bool:
        if self._loss_check is not None:
            self._loss_check.start()  # here, since ranks may differ in the answer
        return unit.index not in self._in_forward and self._store.finished_with(unit)

    def update_now(self, unit: Unit, gradient: Future[Gradient]) -> None:
        """Start the update of a unit whose gradient is complete."""
        self._store.start_update(unit, self.job(unit, self._early_scale, gradient))

    def postpone(self, unit: Unit) -> None:
        """Leave the update of a unit, whose gradient is complete, to the end of the step."""
        self._store.postpone_update(unit)


class DeferredUpdates:
    """Leaves all updates to `engine.step()`, and reads the first units' optimizer states as backward ends."""

    def __init__(self, store: UnitStore) -> None:
        self._store = store

    def can_update_now(self, unit: Unit) -> bool:
        return False

    def update_now(self, unit: Unit, gradient: Future[Gradient]) -> None:
        raise AssertionError(f"unit {unit.name} is updated by engine.step()")

    def postpone(self, unit: Unit) -> None:
        self._store.read_states_ahead()
