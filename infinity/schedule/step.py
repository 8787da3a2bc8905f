"""The state of one training step: micro-batches, updated units, and the legal calls.

A step begins with its first backward and ends with `engine.step()`. Only `Step` counts micro-batches; the schedule, the
runner and the engine read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

from infinity.errors import UsageError


class Phase(Enum):
    """Phase of a step."""

    IDLE = "between two steps: no gradients"
    ACCUMULATING = "gradients of some of the step's micro-batches are collected"
    COLLECTED = "gradients of all micro-batches are collected, and nothing has been updated"
    UPDATED = "backward has updated units with the step's gradients"


class Call(Enum):
    """User calls that are legal only in some phases."""

    READ = auto()  # a forward, or a read of parameters
    BACKWARD = auto()
    STEP = auto()
    OPTIMIZER_STEP = auto()
    ZERO_GRAD = auto()
    DROP_GRADIENTS = auto()
    TRAIN_BATCH = auto()
    STATES = auto()  # a checkpoint or an optimizer state_dict, which contain no gradients


LEGAL: Mapping[Phase, frozenset[Call]] = {
    Phase.IDLE: frozenset(Call) - {Call.STEP},
    Phase.ACCUMULATING: frozenset(Call) - {Call.ZERO_GRAD, Call.STATES, Call.TRAIN_BATCH},
    Phase.COLLECTED: frozenset(Call) - {Call.STATES, Call.TRAIN_BATCH},
    Phase.UPDATED: frozenset({Call.STEP, Call.OPTIMIZER_STEP}),
}
"""Phase → legal calls."""


class Step:
    """The present step of one engine. accumulation: micro-batches per step. early: backward updates units. managed:
    False: a step ends with each `engine.step()`, whatever the number of its micro-batches.
    """

    def __init__(self, accumulation: int, *, early: bool, managed: bool = True) -> None:
        self.accumulation = accumulation
        self.managed = managed
        self.micro_steps = 0
        """Number of backwards in this step that produced gradients."""
        self.updated: set[int] = set()
        """Units whose update with this step's gradients is done or pending; they accept no more gradients."""
        self.is_last_micro_step = False
        """True if the running backward is the last of its step."""
        self.is_complete = False
        """True if the last backward of the step has ended."""
        self.boundary: bool | None = None
        """Set by the user: True if each backward is the last of its step, False if none is. None: after `accumulation`
        micro-batches."""
        self.counts_calls = False
        """True: a micro-batch ends with `engine.step()`, and may have several backwards. False: with its backward."""
        self.averages_plain = False
        """True: gradients of a plain `loss.backward()` are divided by `accumulation`, as `engine.backward` does."""
        self.skips_overflows = False
        """True: a step in bf16 with gradients that are not finite is skipped, as in fp16. False: it raises an error."""
        self.unscaled = 0
        """Number of the step's backwards that did not start from a scaled loss."""
        self.is_scaled = False
        """True if the running backward started from a scaled loss. A hook on that loss sets it: a scaled loss without a
        backward, or a `zero_grad` between the two, changes nothing."""
        self.updates_early = early
        """True if backward may update units."""
        self._unsynced = 0
        self._micro_batch: int | None = None
        """The micro-batch of which the present backwards are pieces; None: a backward is a whole one."""
        self._passed = 0
        """Number of micro-batches of this step that `engine.step()` has been called for."""

    @property
    def phase(self) -> Phase:
        if self.updated:
            return Phase.UPDATED
        if self.micro_steps == 0:
            return Phase.IDLE
        return Phase.COLLECTED if self.is_due else Phase.ACCUMULATING

    @property
    def is_due(self) -> bool:
        """True if `engine.step()` updates with the gradients collected so far."""
        if self.boundary is not None or not self.managed:
            return self.boundary is not False
        return (self._passed + 1 if self.counts_calls else self.micro_steps) >= self.accumulation

    @property
    def is_at_boundary(self) -> bool:
        """True if the present micro-batch is the last of its step. The next one begins after `engine.step()`.

        False without `managed`: only the call of `engine.step()` ends a step.
        """
        if self.boundary is not None or not self.managed:
            return bool(self.boundary)
        return not self._unsynced and (self.is_complete or self._passed + 1 >= self.accumulation)

    @property
    def weight(self) -> float:
        """Factor of the gradients that arrive in the running backward."""
        return 1.0 / self.accumulation if self.averages_plain and not self.is_scaled else 1.0

    # -- calls -------------------------------------------------------------------------------------------------------

    def check(self, call: Call, what: str = "") -> None:
        """Raise UsageError if `call` is not legal now. what: first words of its text, for some calls."""
        if self._unsynced and call in (Call.STEP, Call.OPTIMIZER_STEP):
            raise UsageError("engine.step() was called in an engine.no_sync() block: call it after the block")
        if call is Call.BACKWARD and self.updates_early and self.is_complete:
            raise self._too_many_backwards()
        if call is Call.TRAIN_BATCH and (self._unsynced or self.boundary is not None or not self.managed):
            raise UsageError(
                "engine.train_batch() runs a whole step, and was called in an engine.no_sync() block, after "
                "engine.set_gradient_accumulation_boundary(), or without managed_gradient_accumulation. Call "
                "engine.backward() and engine.step() for each micro-batch instead."
            )
        if call not in LEGAL[self.phase]:
            raise self._refusal(call, what)

    def _refusal(self, call: Call, what: str) -> UsageError:
        if call is Call.STEP:
            return UsageError("engine.step() was called without a backward before it: call engine.backward(loss) first")
        if call is Call.BACKWARD:
            return self._too_many_backwards()
        if call is Call.READ:
            return UsageError(
                f"{what} between backward and engine.step(), and backward has already updated units with this step's "
                'gradients. Call engine.step() first, set infinity.update to "next_forward", which changes nothing '
                "before engine.step(), or, for several backwards a step, set gradient_accumulation_steps."
            )
        if call is Call.STATES:
            return self._without_gradients(what)
        if call is Call.TRAIN_BATCH:
            return UsageError(
                f"engine.train_batch() was called after {self.micro_steps} of {self.accumulation} micro-batches of a "
                "step: call engine.step() first, or drop their gradients with engine.drop_gradients()"
            )
        if self.phase is Phase.UPDATED:
            return UsageError(
                f"{what} cannot drop the gradients of this step: backward has already updated units with them. Call "
                'engine.step() first, or set infinity.update to "next_forward", so that backward updates nothing.'
            )
        return UsageError(
            f"{what} was called after {self.micro_steps} of {self.accumulation} micro-batches of a step, whose "
            "gradients are being accumulated. Remove the call, since engine.step() clears the gradients itself. To "
            "drop them, call engine.drop_gradients()."
        )

    def _too_many_backwards(self) -> UsageError:
        if self.boundary:
            return UsageError(
                "backward was called twice before engine.step() at a boundary that was set, and the first "
                "call has updated units. Call engine.set_gradient_accumulation_boundary(False) before all but the last "
                'micro-batch of a step, or set infinity.update to "next_forward".'
            )
        return UsageError(
            f"backward was called more than gradient_accumulation_steps times ({self.accumulation}) before "
            "engine.step(), and the last of these has updated units. Call engine.step() first, add the losses of a "
            "micro-batch and call backward once, raise gradient_accumulation_steps, or set infinity.update to "
            '"next_forward".'
        )

    def _without_gradients(self, what: str) -> UsageError:
        if self.phase is Phase.ACCUMULATING:
            return UsageError(
                f"{what} holds no gradients, but those of {self.micro_steps} of {self.accumulation} micro-batches are "
                "collected: call backward for the others and engine.step() first, or drop them with "
                "engine.drop_gradients()"
            )
        return UsageError(f"{what} holds no gradients: make it after engine.step(), not between backward and step")

    # -- transitions -------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Postpone the last micro-batch of the step until after the block. Blocks nest."""
        self._unsynced += 1
        try:
            yield
        finally:
            self._unsynced -= 1

    @property
    def may_end(self) -> bool:
        """False if another micro-batch of the step is known to follow the running backward."""
        return self.is_last_micro_step or not (self._unsynced or self.managed or self.boundary is False)

    @property
    def is_in_pieces(self) -> bool:
        """True if the present backwards are pieces of a micro-batch's."""
        return self._micro_batch is not None

    @contextmanager
    def in_pieces(self, micro_batch: int) -> Iterator[None]:
        """Take each backward in the block as a piece of the backward of `micro_batch`, from 0, of a scaled loss.

        The step's micro-batches are counted by `end_pieces`.
        """
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def end_pieces(self) -> None:
        """Count all micro-batches of the step, after the last piece of the last one."""
        self.micro_steps = self.accumulation
        self.is_complete = True
        if self.counts_calls:
            self._passed = self.accumulation - 1

    def set_boundary(self, is_boundary: bool) -> None:
        """Record whether each backward from now on is the last of its step."""
        self.boundary = is_boundary

    def note_scaled(self) -> None:
        """Record that the running backward passes through a loss that was multiplied by the loss scale."""
        self.is_scaled = True

    def begin_backward(self) -> None:
        if self._micro_batch is not None:
            self.is_last_micro_step = self._micro_batch + 1 == self.accumulation
            self.is_scaled = True
            return
        self.is_last_micro_step = self._ends_step and not self._unsynced

    @property
    def _ends_step(self) -> bool:
        """True if the step ends with the backward that begins."""
        if self.boundary is not None or not self.managed:
            return bool(self.boundary)
        return (self._passed if self.counts_calls else self.micro_steps) + 1 >= self.accumulation

    def end_backward(self, *, counts: bool) -> None:
        """Count a backward that ended. counts: it produced gradients; `torch.autograd.grad` produces none."""
        if self._micro_batch is not None:
            self.is_scaled = False
            return
        self.micro_steps += counts
        self.is_complete = self.is_complete or (counts and self.is_last_micro_step)
        self.unscaled += counts and not self.is_scaled
        self.is_scaled = False

    def end_micro_batch(self) -> None:
        """Record a call of `engine.step()` that updates nothing."""
        self._passed = self._passed + 1 if self.counts_calls else self.micro_steps

    def add_updated(self, units: Iterable[int]) -> None:
        self.updated.update(units)

    def end(self) -> None:
        """Reset the state after the step's gradients were passed to updates or dropped."""
        self.micro_steps = 0
        self._passed = 0
        self.updated = set()
        self.is_complete = False
        self.unscaled = 0
        self.is_scaled = False


def changed_during_update(group: int, names: str) -> UsageError:
    """Return the error for hyper-parameters `names` of a param_group that changed after backward had updated units."""
    return UsageError(
        f"{names} of param_group {group} changed between backward and engine.step(), and backward has already updated "
        "units with the old values. Change them before backward or after engine.step(), or set infinity.update to "
        '"next_forward", which changes nothing before engine.step(). To continue, restore the old values.'
    )


def unscaled_loss(unscaled: int, micro_steps: int, scale: float) -> UsageError:
    """Return the error for gradients without the loss scale of fp16."""
    return UsageError(
        f"Loss scaling is required in fp16, and {unscaled} of {micro_steps} backwards of this step started from a loss "
        f"that was not scaled by {scale:g}, so the gradients were dropped. Call engine.backward(loss) or "
        "engine.scale(loss).backward()."
    )


def after_a_failed_backward() -> UsageError:
    """Return the error for `optimizer.step()` after a backward that an exception cut short."""
    return UsageError(
        "optimizer.step() was called after a backward that failed, so its gradients are incomplete. Call the model "
        "again, which drops them, then backward and step."
    )
