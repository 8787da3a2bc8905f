"""One unit's update in one step, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from infinity.optim.parameter_rule import ParameterHyper
from infinity.plan.layout import Run, UnitLayout
from infinity.rules import Hyper
from infinity.tiers.pool import Lease
from infinity.tiers.transfer import DONE, Promise, Transfer
from infinity.update.draft import Draft

INLINE = 1 << 15
"""Largest shard, in elements, that the calling thread processes itself if nothing has to be waited for: waking another
thread would take longer."""


@dataclass(eq=False, slots=True)
class Squares:
    """A gradient's sum of squares. Any thread may ask for it."""

    known: float | None
    """None: it is not summed (yet)."""

    def total(self) -> float:
        """Return the sum. Waits for the device if that computes it (`infinity.grads.squares`)."""
        assert self.known is not None, "the squares of an incomplete sum are not summed"
        return self.known


class _SharedLease:
    """A lease with two holders, which may release it in different threads."""

    def __init__(self, lease: Lease | _SharedLease) -> None:
        self._lease = lease
        self._is_last = iter((False, True))  # `next` is atomic

    def release(self) -> None:
        if next(self._is_last):
            self._lease.release()


class Gradient:
    """A reduced gradient shard (shard_numel,) in a leased buffer or in its extent, and its sum of squares."""

    def __init__(
        self, shard: torch.Tensor, lease: Lease | _SharedLease | None, squares: Squares, reached: Transfer
    ) -> None:
        """lease: released with the gradient; None: the shard is in its extent alone. reached: done when `shard` is
        computed, for an update on the device.
        """
        self.shard = shard
        self.squares = squares
        self.reached = reached
        self._on_release: Callable[[], None] | None = None
        self._lease = lease
        self._released = Promise()

    def call_on_release(self, call: Callable[[], None]) -> None:
        """Call `call` once nothing reads the gradient."""
        self._on_release = call

    def share(self) -> Gradient:
        """Return the same gradient for a second reader. The buffer is released with the last of the two."""
        if self._lease is not None:
            self._lease = _SharedLease(self._lease)
        return Gradient(self.shard, self._lease, self.squares, self.reached)

    @property
    def is_in_extent(self) -> bool:
        """Return whether the shard is in its extent alone."""
        return self._lease is None

    def release(self) -> None:
        del self.shard
        if self._lease is not None:
            self._lease.release()
        if self._on_release is not None:
            self._on_release()
        self._released.keep()

    def wait_until_released(self) -> None:
        self._released.wait()


@dataclass(eq=False, slots=True)
class UpdateProgress:
    """How far a unit's update has come. Kept by the unit and by commits; it refers to no memory of the unit."""

    began: Promise = field(default_factory=Promise)
    """Done when the update was passed to the pipeline."""
    computed: Promise = field(default_factory=Promise)
    """Done when the parameters are updated."""
    done: Promise = field(default_factory=Promise)
    """Done when all states are back in their tiers."""

    def fail(self, error: BaseException) -> None:
        for promise in (self.computed, self.done):
            if not promise.done():
                promise.fail(error)


@dataclass(eq=False, slots=True)  # a frozen one takes five times as long to make, once a unit
class UpdateJob:
    """One unit's update in one step, before it is known where the parameters are. Nothing changes it."""

    layout: UnitLayout
    runs: Callable[[], Sequence[Run]]
    """Returns the ranges to update. Called once the gradient has arrived, since it shows which parameters have one."""
    hypers: Sequence[Hyper | ParameterHyper]
    grad_scale: float
    first: int
    """Index of the shard's first element in the model."""
    gradient: Future[Gradient] | None = None
    """The gradient shard, in memory that the update can work in; None: read from its tier, tile by tile."""
    require_finite: bool = False
    draft: Draft | None = None
    """None: the update is final."""
    allowed: Callable[[], bool] | None = None
    """Returns whether the update may happen, and waits until that is known; None: it may."""
    gate: Transfer = DONE
    """Done when the unit's states may be written: when the snapshots that were due at the job's creation are read."""
    progress: UpdateProgress = field(default_factory=UpdateProgress)

    def arrived(self) -> Gradient:
        assert self.gradient is not None
        return self.gradient.result()

    def release_gradient(self) -> None:
        if self.gradient is not None and self.gradient.exception() is None:
            self.gradient.result().release()


@dataclass(eq=False, slots=True)
class PlacedUpdate:
    """An update and the parameters that it changes. It refers to the unit's buffer: no one keeps it but the pipeline.

    The update starts once all of `after`, `checked` and `arrives` are done.
    """

    job: UpdateJob
    target: torch.Tensor | None
    """This rank's shard of the unit's device buffer, uint8; None: the update changes the tier alone."""
    arrives: Transfer | None
    """Done when the target holds the parameters; None: the update reads them from their tier."""
    reached: Transfer
    """Done when compute no longer uses the buffer, so that it may be written."""
    fetched: Transfer = DONE
    """Done when the last fetch no longer reads the parameters' tier, so that it may be written."""
    after: Transfer = DONE
    """Done after the unit's previous update, whose writes this one reads, and after a save that still reads the states.
    """
    prepare: Callable[[], None] | None = None
    """Called once, before the update reads any state and after `after`."""
    checked: Transfer = DONE
    """Done when `prepare` does not wait for the device."""
    writes: bool = True
    """Write the parameters to their tier, where the target is not their extent."""
