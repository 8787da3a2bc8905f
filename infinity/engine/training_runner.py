"""The runner of a training engine: follows a step's gradients from their arrival to the update of their unit.

One gradient's path: autograd fills `.grad` → `arrived` → the collector copies it into the unit's flat gradient → the
schedule says that it was the unit's last → the collector sends the flat gradient to its reduction → the schedule says
when to update the unit → the gradient lands for an update that starts now (`start_update`), or is stored for one that
`engine.step()` starts or leaves to the unit's next use (`make_due`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch

from infinity.comm.communicator import Communicator
from infinity.comm.dtensor import local_gradient
from infinity.engine.loss_check import LossCheck
from infinity.engine.runner import Runner
from infinity.errors import LifetimeError
from infinity.grads.collector import GradCollector
from infinity.grads.store import GradStore
from infinity.interrupts import uninterrupted
from infinity.model.backward import BackwardTracker, ComingGradients
from infinity.model.saved import Scope
from infinity.optim.parameter_rule import ParameterHyper
from infinity.plan.plan import Plan
from infinity.rules import Hyper
from infinity.schedule.schedule import Schedule, Update
from infinity.tiers.device import Device
from infinity.tiers.pool import Lease
from infinity.units.compiled import eager
from infinity.units.released import take_grad
from infinity.units.unit import Residency, Unit
from infinity.units.updating import UpdatingUnits
from infinity.update.draft import Ceiling, Draft
from infinity.update.job import Gradient, UpdateJob
from infinity.update.pipeline import UpdatePipeline


class TrainingRunner(Runner):
    """Runs the units of a training engine."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        updating: UpdatingUnits,
        scope: Scope,
        device: Device,
        ranks: Communicator,
        backward: BackwardTracker,
        coming: ComingGradients,
        collector: GradCollector,
        gradients: GradStore,
        pipeline: UpdatePipeline,
    ) -> None:
        super().__init__(plan, schedule, updating.store, scope, device, ranks)
        self.hypers: Sequence[Hyper | ParameterHyper] = ()
        """Hyper-parameters of the updates that are created next, one entry per param_group."""
        self._updating = updating
        self._backward = backward
        self._coming = coming
        self._collector = collector
        self._gradients = gradients
        self._pipeline = pipeline
        self._early_scale = 1.0 / plan.grad_divisor
        """Factor of gradients, summed over ranks, in updates during backward."""
        self._drafts: dict[int, UpdateJob] = {}
        """unit → its draft in this step, which is neither kept nor taken back yet."""
        self._assumed: tuple[float, Sequence[Hyper | ParameterHyper]] = 1.0, ()
        """Factor of gradients and hyper-parameters of the step's drafts."""
        self._ceiling = Ceiling(math.inf)
        self._check_nan = plan.check_nan
        self._loss_check: LossCheck | None = None
        """The check of the running backward's loss, for which its updates wait; None: the loss is finite."""

    # -- gradients ---------------------------------------------------------------------------------------------------

    def watch(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Install the hooks that empty `.grad` as soon as autograd has filled it."""
        return [
            parameter.register_post_accumulate_grad_hook(self._hook(unit, slot))
            for unit in self.store.units
            if unit.layout.trainable
            for slot, parameter in enumerate(unit.parameters)
        ]

    def _hook(self, unit: Unit, slot: int) -> Callable[[torch.Tensor], None]:
        # Weak: the garbage collector does not traverse these hooks, so a cycle through them would leak.
        runner, index = weakref.ref(self), unit.index

        @eager
        def arrived(parameter: torch.Tensor) -> None:
            alive = runner()
            if alive is not None:
                gradient = take_grad(parameter)
                if gradient is None:
                    alive.cleared()
                else:
                    alive.arrived(alive.store.units[index], slot, local_gradient(parameter, gradient))

        return arrived

    def cleared(self) -> None:
        """Count this backward, although a user's hook has used and cleared its gradient (an optimizer in backward)."""
        self._backward.notice()
        self.schedule.arrivals.note_cleared()

    @uninterrupted()
    def arrived(self, unit: Unit, slot: int, gradient: torch.Tensor) -> None:
        """A gradient of a parameter has arrived."""
        self._backward.notice()
        self._device.follow_compute()
        if not self._collector.holds_back(unit, slot, gradient):
            self._collect(unit, slot, gradient)
            self._coming.arrived(unit, slot)
            if self.schedule.gradient(unit.index, len(unit.parameters)) and not self._coming.expects(unit):
                self._send(unit)

    def _collect(self, unit: Unit, slot: int, gradient: torch.Tensor) -> None:
        step, arrivals = self.schedule.step, self.schedule.arrivals
        if unit.index in self.schedule.speculation.drafted:
            self.withdraw(unit)  # a backward inside of a backward, which its graph did not show
        if unit.index in step.updated:
            raise LifetimeError(
                f"unit {unit.name} received a gradient after its update in the same step, from a backward inside of a "
                "backward that its graph did not show. Load the last checkpoint, and set infinity.update to "
                '"next_forward", which waits for engine.step().'
            )
        if unit.index not in arrivals:
            self._finish_update(unit)
        self._collector.collect(unit, slot, gradient, weight=step.weight, last=step.may_end)
        arrivals.add(unit.index)

    def _finish_update(self, unit: Unit) -> None:
        """Execute the update of a former step, if no forward has used the unit since.

        Its stored gradient is read before the next one is written. Otherwise returns at once.
        """
        if unit.due_update is not None or unit.residency is Residency.UPDATING:
            with self.store.moves.moving():
                self._arrive(unit)
        elif unit.residency is not Residency.RESIDENT and unit.update is not None:  # prefetched, or in the tier alone
            with self.store.moves.moving():
                self.store.moves.await_update(unit.update)

    def _pass_to(self, unit: Unit) -> None:
        if not self.schedule.alone and self.schedule.arrivals.any:
            with uninterrupted():
                for index in self.schedule.passing(self._collector.collecting, unit.index):
                    self._send(self.store.units[index])

    def _send(self, unit: Unit) -> None:
        """Reduce the unit's gradient over ranks, and update the unit or keep the gradient."""
        step = self.schedule.step
        sent = self._collector.send(unit, last=step.may_end)
        if self._loss_check is not None and step.is_last_micro_step and step.updates_early:
            self._loss_check.start()  # here, since ranks may differ in the answer
        update = self._when_updated(unit) if step.is_last_micro_step else Update.AT_STEP
        if update is Update.NOW:
            step.add_updated([unit.index])
            self.start_update(unit, self._job(unit, self._early_scale, self._gradients.land(sent)))
        elif update is Update.DRAFT and not self._ceiling.is_exceeded:
            self._start_draft(unit, self._gradients.keep(sent, lands=True))
        else:
            self._gradients.keep(sent)
            if step.is_last_micro_step:
                self._postpone(unit)

    def _when_updated(self, unit: Unit) -> Update:
        """Return when the unit, whose last gradient of the step is sent, is updated."""
        may_be_read = unit.residency is not Residency.RESIDENT or unit.references > 0
        is_viewed = partial(self.store.is_viewed, unit)
        update = self.schedule.update(unit.index, may_be_read=may_be_read, is_viewed=is_viewed)
        return Update.AT_STEP if self._coming.expects(unit) else update

    def _postpone(self, unit: Unit) -> None:
        """Leave the update of a unit, whose gradient is complete, to the end of the step."""
        if self.schedule.step.updates_early or unit.index in self.schedule.speculation.drafted:
            if self.schedule.alone or unit.residency is not Residency.RESIDENT:
                return
            if self.schedule.trace.passed(unit.index):
                self._updating.release_passed(unit)
        elif self._pipeline.reads_ahead:
            units = self.store.units
            first = self.schedule.first_updates(lambda index: units[index].residency is Residency.RELEASED)
            layouts = (units[index].layout for index in first)
            self._pipeline.read_ahead(layout for layout in layouts if layout.trainable)

    # -- updates -----------------------------------------------------------------------------------------------------

    @contextmanager
    def checking(self, check: LossCheck) -> Iterator[None]:
        """Let the updates of the backward in the block wait for `check`, which has its result at the end."""
        self._loss_check = check
        try:
            yield
        finally:
            self._loss_check = None

    def _job(
        self, unit: Unit, scale: float, gradient: Future[Gradient] | None, draft: Draft | None = None
    ) -> UpdateJob:
        """Return the job that updates `unit` in this step. gradient: None to read it from its tier."""
        slots, rank = self._gradients.slots, self._ranks.shard_rank
        return UpdateJob(
            unit.layout,
            lambda: unit.layout.runs(rank, unit.advance(slots[unit.index])),
            self.hypers,
            scale,
            unit.layout.first + unit.layout.shard_range(rank)[0],
            gradient,
            draft=draft,
            require_finite=gradient is not None and self._check_nan,
            allowed=None if gradient is None or self._loss_check is None else self._loss_check.passed,
            gate=unit.snapshot_read,
        )

    @uninterrupted()
    def start_update(self, unit: Unit, job: UpdateJob) -> None:
        """Start an update in the unit's buffer: → UPDATING."""
        placed = self._updating.place(unit, job)
        in_tier_alone = placed.target is None
        try:
            self._pipeline.submit(placed)
        finally:
            del placed  # it refers to the buffer, whose lease may end as soon as the job is done
        self._updating.leave_if_unused(unit, in_tier_alone=in_tier_alone)

    def _start(self, unit: Unit, lease: Lease) -> None:
        """Start to fetch a released unit into a buffer, after its pending update, if any."""
        due = unit.due_update
        if due is None:
            super()._start(unit, lease)
            return
        self.store.assign(unit, lease)
        self.start_update(unit, due)
        self.store.follow_update(unit)

    def start_due_updates(self) -> None:
        """Start every pending update."""
        with self.store.moves.moving():
            for unit in self.store.units:
                if unit.due_update is not None:
                    if unit.residency is Residency.RELEASED:
                        self._updating.assign(unit)
                    self.start_update(unit, unit.due_update)

    def settle(self) -> None:
        """Take back drafts, start every pending update, and wait until all are done and written back."""
        self._take_back_drafts()
        self.start_due_updates()
        self.store.await_updates()
        with self.store.moves.moving(), self.recorder.wait("update", "update"):
            self._pipeline.drop_ahead()

    # -- drafts ------------------------------------------------------------------------------------------------------

    def begin_backward(self, hypers: Sequence[Hyper | ParameterHyper], scale: float, ceiling: float) -> None:
        """Let updates during the backward that begins use `hypers`, one entry per param_group.

        Drafts assume that `engine.step()` scales gradients, which are summed over ranks, by `scale`; it does not if
        their squares exceed `ceiling`.
        """
        if self._drafts and self.schedule.step.is_in_pieces:
            return  # the pieces before have drafted units that this one does not reach
        self._take_back_drafts()  # a second backward of the step adds to gradients that drafts have used
        self.hypers = hypers
        self._assumed, self._ceiling = (scale, hypers), Ceiling(ceiling)

    def _start_draft(self, unit: Unit, gradient: Future[Gradient] | None) -> None:
        draft = Draft(unit.steps, self._ceiling)
        job = self._drafts[unit.index] = self._job(unit, self._assumed[0], gradient, draft)
        try:
            self.start_update(unit, job)
        except BaseException:
            if not job.progress.began.done():  # nothing would end it
                del self._drafts[unit.index]
            raise

    def use(self, unit: Unit) -> None:
        if unit.index in self.schedule.speculation.drafted:
            self.withdraw(unit)
        super().use(unit)

    @uninterrupted()
    def withdraw(self, unit: Unit) -> None:
        """Take back the unit's draft, if any, since its present states are needed before `engine.step()`.

        All ranks call it alike. They release the unit's buffer, although only some may have made the draft.
        """
        self.schedule.speculation.remove(unit.index)
        job = self._drafts.pop(unit.index, None)
        with self.store.moves.moving():
            if job is not None:
                self._take_back(unit, job, keeps_buffer=False)
            elif not self.schedule.alone and unit.lease is not None:
                self.store.release(unit)

    def _take_back(self, unit: Unit, job: UpdateJob, *, keeps_buffer: bool) -> None:
        assert job.draft is not None
        job.draft.decide(keep=False)
        self.store.moves.await_update(job.progress)
        self._updating.take_back(unit, keeps_buffer=keeps_buffer)

    def _take_back_drafts(self) -> None:
        """Take back all drafts."""
        drafted = sorted(self.schedule.speculation.drafted)
        for index in drafted:
            self.withdraw(self.store.units[index])

    def _decide(self, scale: float) -> list[int]:
        """Keep the step's drafts if gradients are scaled as they assume, else take them back. Returns the units that
        they update.
        """
        keep = (scale, self.hypers) == self._assumed
        drafts, self._drafts = self._drafts, {}
        kept = []
        with self.store.moves.moving():
            for index, job in drafts.items():
                assert job.draft is not None
                if job.draft.decide(keep=keep):
                    kept.append(index)
                else:
                    self.store.moves.await_update(job.progress)
                    self._updating.take_back(self.store.units[index], keeps_buffer=True)
        self._gradients.drop(kept)
        self.schedule.speculation.end_step(scaled=scale != self._assumed[0])
        return kept

    # -- the step ----------------------------------------------------------------------------------------------------

    def use_hypers(self, hypers: Sequence[Hyper | ParameterHyper]) -> None:
        """Set the hyper-parameters of the updates that are created next, one entry per param_group."""
        self.hypers = hypers

    @uninterrupted()
    def end_backward(self) -> bool:
        """Send incomplete gradients. Returns False if no gradient arrived.

        Raises UsageError if a parameter was edited in the backward (`Edits.begin_backward`).
        """
        self.edits.end_backward()
        step, arrivals = self.schedule.step, self.schedule.arrivals
        self._coming.end_backward(last=step.is_last_micro_step)
        for index, slot, gradient in self._collector.due():
            self._collect(self.store.units[index], slot, gradient)
        if arrivals.any and self.schedule.reduces:
            self.send_all()
        return arrivals.end_backward(in_pieces=step.is_in_pieces)

    def send_all(self) -> None:
        """Send all gradients still being collected."""
        for index in self._collector.collecting:
            self._send(self.store.units[index])

    def make_due(self, scale: float) -> None:
        """Turn stored gradients into pending updates, and start those of units that are in a buffer or need none.

        scale: factor of the gradients, which are summed over ranks.
        """
        kept = self._decide(scale)
        ready = self._gradients.take_ready()
        if ready:
            self._gradients.settle()
        self.schedule.step.add_updated([*kept, *ready])
        units = [self.store.units[index] for index in self.schedule.by_first_use(ready)]
        for unit in units:  # all of them first: an error at the start of one leaves the others pending
            unit.postpone(self._job(unit, scale, None))
        for unit in units:
            starts = unit.lease is not None or self._updating.needs_no_buffer(unit)
            if starts and unit.due_update is not None:
                self.start_update(unit, unit.due_update)
        self._count_edits(self.schedule.step.updated)

    def _count_edits(self, updated: Collection[int]) -> None:
        """Increment the versions of the parameters of `updated`, since the step counts as an edit of them.

        Called once a step, as a torch optimizer does, and not at each update: parameters may share a version, as slices
        of one tensor do, and the running backward still needs the others. PyTorch's own check then refuses graphs from
        before the step. On several ranks all parameters of a unit count, since gradients may come from other ranks.
        """
        for unit in map(self.store.units.__getitem__, updated):
            slots = unit.collected if self._ranks.is_single else range(len(unit.parameters))
            torch.autograd.graph.increment_version([unit.parameters[slot] for slot in slots])

    def end_step(self) -> None:
        """Reset the state of the step, after its gradients were passed to updates or dropped after an overflow."""
        self._take_back_drafts()
        self._collector.end_step()
        self._forget_step()

    @uninterrupted()
    def discard(self) -> None:
        """Drop all gradients collected so far, and those that an exception has left in `.grad` before its hook ran."""
        self._take_back_drafts()
        for unit in self.store.units:
            for parameter in unit.parameters if unit.layout.trainable else ():
                take_grad(parameter)
        self._collector.discard()
        self.schedule.arrivals.discard()
        self._forget_step()

    def _forget_step(self) -> None:
        self._coming.end_backward(last=True)
        for unit in self.store.units:
            unit.end_step()
        self.schedule.step.end()
