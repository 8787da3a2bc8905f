"""When the gradient of a unit is complete: by the number of its arrivals, and by the units that backward has passed.

One rank asks the graph that backward executes, from the number of arrivals on that completed the unit the last time:
the query takes time. Several ranks have to send gradients in the same order, although the number of gradients of a unit
may differ between them (experts without tokens on a rank). They follow the units in use, which do not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


class Arrivals:
    """The gradients that have arrived in the running backward, counted by unit."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """unit → its arrivals in this backward."""
        self._before: dict[int, int] = {}
        """unit → its arrivals in the last backward."""
        self._passed: set[int] = set()
        """Units past their last use in this backward."""
        self._unpredictable: set[int] = set()
        """Units that ever received a gradient after their last use."""
        self._predictable: set[int] = set()
        """Units that were passed in an earlier backward and are not in `_unpredictable`."""
        self._cleared = False

    def __contains__(self, unit: int) -> bool:
        return unit in self._counts

    @property
    def any(self) -> bool:
        """True if gradients have arrived in a backward that has not ended."""
        return bool(self._counts)

    def add(self, unit: int) -> None:
        """Count a gradient."""
        self._counts[unit] = self._counts.get(unit, 0) + 1
        if unit in self._passed:
            self._unpredictable.add(unit)

    def note_cleared(self) -> None:
        """Count this backward, although a user's hook has used and cleared a gradient."""
        self._cleared = True

    def may_be_complete(self, unit: int, parameters: int) -> bool:
        """Return whether the unit has as many gradients as in the last backward. parameters: their number otherwise."""
        return self._counts[unit] >= self._before.get(unit, parameters)

    def passing(self, units: Iterable[int], to: int, passed: Callable[[int], bool]) -> Iterator[int]:
        """Yield those of `units`, whose gradients are collected, that are complete as unit `to` is used.

        passed: unit → True if backward does not use it again. A unit that receives gradients after its last use, such
        as an embedding that saves nothing for backward, is complete when backward ends.
        """
        for unit in units:
            if unit != to and unit not in self._passed and passed(unit):
                self._passed.add(unit)
                if unit in self._predictable:
                    yield unit

    def end_backward(self, *, in_pieces: bool) -> bool:
        """Record the arrivals that complete each unit. Returns False if no gradient arrived, as with
        `torch.autograd.grad`. in_pieces: the backward was a piece of a micro-batch's, and other pieces have other
        units.
        """
        cleared, self._cleared = self._cleared, False
        passed, self._passed = self._passed, set()
        if not self._counts:
            return cleared
        self._before = {**(self._before if in_pieces else {}), **self._counts}
        self._predictable |= passed
        self._predictable -= self._unpredictable
        self._counts = {}
        return True

    def discard(self) -> None:
        """Forget a backward that did not end."""
        self._counts = {}
        self._passed = set()
        self._cleared = False
