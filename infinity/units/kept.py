"""Buffers of released units with live views.

In a plain loop a view of a parameter (`self.flat = self.weight.view(-1)`, `p.data` in a list) shows the values that
the optimizer writes. So the unit keeps the buffer behind the view and is fetched into it again. The pool allocates a
fresh buffer instead [Note: kept views].
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import torch

from infinity.errors import LifetimeError, user_level
from infinity.tiers.device import Device
from infinity.tiers.digests import Fingerprint
from infinity.tiers.pool import Lease, Pool
from infinity.units.unit import Unit


@dataclass(frozen=True)
class KeptBuffer:
    """A buffer, uint8 (nbytes,), with live views. generation, fingerprint: the unit's values when it was released."""

    buffer: torch.Tensor
    generation: int
    fingerprint: Fingerprint


class KeptBuffers:
    """The kept buffers of one engine, by unit. Each is from `pool`."""

    def __init__(self, pool: Pool, device: Device) -> None:
        self._pool = pool
        self._device = device
        self._kept: dict[int, KeptBuffer] = {}
        self._overwritten: set[int] = set()
        """Indices of units with live views when their update of the present step began."""
        self.warned: set[int] = set()
        """Indices of units that the user was warned about."""

    def __contains__(self, unit: Unit) -> bool:
        return unit.index in self._kept

    def keep(self, unit: Unit, lease: Lease, *, valid: bool = True) -> KeptBuffer:
        """Quarantine the buffer that the unit leaves. valid: it holds the unit's present parameters."""
        # Taken now, so that an edit through a view is found later, without a version [Note: edits without a version].
        fingerprint = self._device.fingerprint(lease.tensor)
        kept = KeptBuffer(lease.quarantine(), unit.generation if valid else -1, fingerprint)
        self._kept[unit.index] = kept
        return kept

    def take(self, unit: Unit) -> KeptBuffer:
        """Remove and return the unit's buffer."""
        return self._kept.pop(unit.index)

    def clear(self) -> None:
        self._kept.clear()

    def is_viewed(self, unit: Unit) -> bool:
        """Return whether the unit's kept buffer has live views."""
        kept = self._kept.get(unit.index)
        return kept is not None and self._pool.is_referenced(kept.buffer, unit.bound)

    def is_edited(self, unit: Unit, kept: KeptBuffer | None = None) -> bool:
        """Return whether `kept`, or the unit's kept buffer, was edited through views since the unit left it."""
        kept = kept or self._kept.get(unit.index)
        if kept is None:
            return False
        differs = self._device.fingerprint(kept.buffer[: unit.layout.nbytes]) != kept.fingerprint
        if self._device.host_addressable:
            return bool(differs)
        with self._device.recorder.wait("compute", "edits"):
            return bool(differs)

    def note_overwritten(self, unit: Unit) -> None:
        """Record that an update begins while views of the unit are alive."""
        self._overwritten.add(unit.index)

    def is_overwritten(self, unit: Unit) -> bool:
        return unit.index in self._overwritten

    def forget_overwritten(self) -> None:
        self._overwritten = set()

    def shows_past(self, unit: Unit) -> bool:
        """Return whether live views show values from before an update, of this rank's shard or of another rank's."""
        # The update has written this rank's shard at most; those of other ranks come with a fetch.
        if unit.index in self._overwritten:
            return True
        kept = self._kept.get(unit.index)
        if kept is None:
            return False
        # A pending update has not changed the kept values yet, but in a plain loop step() has.
        due = unit.due_update is not None or kept.generation != unit.generation
        return due and self.is_viewed(unit)

    def warn(self, unit: Unit) -> None:
        """Warn once that views of a released unit cost a buffer. Call it last: warnings may be set to raise."""
        handling = sys.exc_info()[0] is not None  # its traceback keeps references
        # Once per unit: the same line of the model causes it in each step.
        if unit.index not in self.warned and not handling:
            self.warned.add(unit.index)
            warnings.warn(
                f"something still refers to the parameters of unit {unit.name} after it was released, such as a view. "
                "The view shows their current values, at the cost of one more buffer. To avoid it, keep the parameter "
                "itself or `parameter.clone()`.",
                stacklevel=user_level(),
            )


def edit_lost(unit: Unit) -> LifetimeError:
    return LifetimeError(
        f"a view of the parameters of unit {unit.name} was edited while the unit was released, and the unit "
        "has been overwritten since: the edit is lost. Edit the parameter itself, under torch.no_grad()."
    )
