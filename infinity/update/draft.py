"""A draft: an update that is made before it is known whether its gradient has to be scaled, and may be taken back.

[Note: updates before the norm is known]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from infinity import concurrency
from infinity.plan.placement import Extent
from infinity.tiers.base import Tier


class Ceiling:
    """The sum of squares up to which gradients need no scaling, and the squares of the step's drafts so far.

    Used by the thread of updates; the model's thread may look at `is_exceeded`.
    """

    def __init__(self, squares: float) -> None:
        """squares: limit on the sum over all gradients of the step; inf: they only have to be finite."""
        self._limit = squares
        self._sum = 0.0

    def add(self, squares: float) -> None:
        self._sum += squares

    @property
    def is_exceeded(self) -> bool:
        """Return whether the step is sure to scale its gradients or to be skipped."""
        return not (self._sum <= self._limit and math.isfinite(self._sum))


class _Stage(Enum):
    QUEUED = auto()
    OPEN = auto()
    DECLINED = auto()
    MADE = auto()
    """The update has ended, and its bytes are in the spare slots."""


class Draft:
    """One unit's draft. `decide` is called by the model's thread, the rest by the thread of updates."""

    def __init__(self, steps: list[int], ceiling: Ceiling) -> None:
        """steps: number of updates of each parameter of the unit, which the update changes."""
        self._steps, self._steps_before = steps, list(steps)
        self._ceiling = ceiling
        self._access = concurrency.lock()
        self._stage = _Stage.QUEUED
        self._verdict: bool | None = None
        self._places: list[tuple[Tier, Extent]] = []

    def open(self, places: Sequence[tuple[Tier, Extent]]) -> bool:
        """Begin the update, which writes spare slots of `places` unless it is final by now.

        Returns False if it must not be made. `end` follows in either case.
        """
        with self._access:
            if self._verdict is True:
                self._stage = _Stage.OPEN
                return True
            if self._verdict is None and not self._ceiling.is_exceeded:
                for tier, extent in places:
                    if not tier.begin_draft(extent):
                        break
                    self._places.append((tier, extent))
                else:
                    self._stage = _Stage.OPEN
                    return True
            self._stage = _Stage.DECLINED
            return False

    def proceed(self, squares: float) -> bool:
        """Return whether to go on, now that the gradient's sum of squares is known. Nothing has been written."""
        self._ceiling.add(squares)
        with self._access:
            if self._verdict is not True and (self._verdict is False or self._ceiling.is_exceeded):
                self._stage = _Stage.DECLINED
            return self._stage is _Stage.OPEN

    def end(self, *, failed: bool) -> None:
        """End the update once its writes have ended. failed: the bytes it wrote are not whole."""
        with self._access:
            if failed or self._stage is _Stage.DECLINED:
                self._settle(keep=False)
            elif self._verdict is not None:
                self._settle(keep=self._verdict)
            else:
                self._stage = _Stage.MADE

    def decide(self, *, keep: bool) -> bool:
        """Keep the update or take it back. Returns whether the unit is, or will be, updated."""
        with self._access:
            assert self._verdict is None
            self._verdict = keep
            if self._stage is _Stage.MADE:
                self._settle(keep=keep)
            return keep and self._stage is not _Stage.DECLINED

    def _settle(self, *, keep: bool) -> None:
        for tier, extent in self._places:
            tier.end_draft(extent, keep=keep)
        self._places = []
        if not keep:
            self._steps[:] = self._steps_before
