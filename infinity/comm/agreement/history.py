"""Agreed collectives of one communicator, and the prediction of the next one.

The prediction depends on agreed collectives alone, so that all ranks predict the same without a message.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from infinity.comm.agreement.announcements import Announcement

_CAPACITY = 1 << 17
"""Collectives remembered; the older half is forgotten at once."""
_CANDIDATES = 256
"""Earlier occurrences that are compared after a wrong prediction."""
_LONGEST = 256
"""Collectives that are compared before each of them."""


@dataclass(frozen=True, eq=False)
class Agreed:
    """A collective that all ranks issued."""

    announced: Announcement
    own: tuple[int, ...] = ()
    """Packed flags of this rank."""
    union: tuple[int, ...] = ()
    """Packed flags of all ranks."""


class History:
    """Predicts a periodic sequence after one or two periods, by following its previous occurrence.

    A place in the past advances with every collective. After a wrong prediction it moves to the place whose preceding
    collectives agree with the latest ones for longest.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._past: list[Agreed] = []
        self._places: dict[Announcement, list[int]] = defaultdict(list)
        """Indices of each collective in the past, ascending."""
        self._next: int | None = None
        """Index of the collective that is predicted to occur again."""

    @property
    def predicted(self) -> Agreed | None:
        """The next collective; None if the past has no example."""
        return None if self._next is None else self._past[self._next]

    def append(self, agreed: Agreed) -> None:
        """Record the collective that all ranks issued next."""
        predicted = self.predicted
        self._past.append(agreed)
        if self._next is not None and predicted is not None and predicted.announced == agreed.announced:
            self._next += 1
        else:
            self._next = self._resume()
        self._places[agreed.announced].append(len(self._past) - 1)
        # Half at once: to forget one each time would renumber all places each time.
        if len(self._past) == self._capacity:
            self._forget(self._capacity // 2)

    def _resume(self) -> int | None:
        """Return the index after the earlier place that resembles the present one most; None if there is none."""
        places = self._places[self._past[-1].announced][-_CANDIDATES:]
        # `max` keeps the first of equals, so that the latest place wins, on all ranks alike.
        best = max(reversed(places), key=self._length_in_common, default=None)
        return None if best is None else best + 1

    def _length_in_common(self, index: int) -> int:
        """Return how many collectives before `index` equal those before the latest one."""
        past = self._past
        longest = min(index, _LONGEST)
        return next((n for n in range(longest) if past[index - 1 - n].announced != past[-2 - n].announced), longest)

    def _forget(self, count: int) -> None:
        """Forget the oldest `count` collectives."""
        del self._past[:count]
        self._places.clear()
        for index, agreed in enumerate(self._past):
            self._places[agreed.announced].append(index)
        if self._next is not None:
            self._next = self._next - count if self._next >= count else None
