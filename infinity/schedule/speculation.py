"""When a step tries drafts: updates during backward that assume that no gradient has to be scaled. Pure.

Ranks decide alike, since they share the plan and the norm.
"""

from __future__ import annotations

from collections.abc import Collection

PATIENCE = 4
"""Steps that must not scale their gradients before drafts are tried again.

After n steps without scaling, the next one scales with probability 1 / (n + 2) if nothing else is known (Laplace's rule
of succession), here 1 in 6. A dropped draft costs about as much as a kept one saves, so a try then pays.
"""


class Speculation:
    """Decides from step to step."""

    def __init__(self, units: Collection[int]) -> None:
        """units: those whose updates may be drafts (`Plan.drafted`)."""
        self._units = frozenset(units)
        self.patience = PATIENCE
        self._wait = 0
        """Steps without scaling to wait for."""
        self.drafted: set[int] = set()
        """Units whose update in this step is a draft, on this rank or on others."""

    @property
    def is_on(self) -> bool:
        """Return whether this step tries drafts."""
        return bool(self._units) and not self._wait

    def may_draft(self, unit: int) -> bool:
        return self.is_on and unit in self._units

    def add(self, unit: int) -> None:
        """Record that the update of a unit is a draft, on this rank or on others."""
        self.drafted.add(unit)

    def remove(self, unit: int) -> None:
        """Record that the draft of a unit is taken back."""
        self.drafted.discard(unit)

    def end_step(self, *, scaled: bool) -> None:
        """Record a step that ended. scaled: its gradients were clipped, or it was skipped."""
        self._wait = self.patience if scaled else max(0, self._wait - 1)
        self.drafted = set()
