"""Announcements: descriptions of collectives, which ranks compare, since different collectives would deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

_FLAGS = 62
"""Flags in an exchanged word, an int64."""


class Operation(IntEnum):
    """Collectives of a communicator."""

    ALL_GATHER = 0
    REDUCE = 1
    ALL_GATHER_STATE = 2
    BROADCAST = 3
    SUM = 4
    READ_STATES = 5
    REFRESH_VIEWS = 6
    BARRIER = 7
    GIVE_UP = 8
    COMPARE_BATCHES = 9


_VERBS = {
    Operation.ALL_GATHER: "gathers",
    Operation.REDUCE: "reduces the gradient of",
    Operation.ALL_GATHER_STATE: "gathers a state",
    Operation.BROADCAST: "broadcasts",
    Operation.SUM: "sums numbers",
    Operation.READ_STATES: "reads states",
    Operation.REFRESH_VIEWS: "refreshes views",
    Operation.BARRIER: "waits for all",
    Operation.GIVE_UP: "gives up",
    Operation.COMPARE_BATCHES: "compares the first batches",
}


_SYNCHRONOUS = frozenset(Operation) - {Operation.BROADCAST, Operation.GIVE_UP}


@dataclass(frozen=True)
class Announcement:
    """A collective that a rank is about to issue. All ranks issue it if theirs are equal."""

    operation: Operation
    unit: int | None = None
    length: int = 0
    """Number of exchanged elements, for collectives without a unit."""

    def words(self) -> list[int]:
        """Return the announcement as integers, for an all-gather."""
        return [self.operation, -1 if self.unit is None else self.unit, self.length]

    @classmethod
    def of(cls, words: Sequence[int]) -> Announcement:
        operation, unit, length = words
        return cls(Operation(operation), None if unit < 0 else unit, length)

    def is_synchronous(self, ranks: int) -> bool:
        """Return whether no rank can end this collective before all of `ranks` have begun it."""
        if self.operation is Operation.ALL_GATHER_STATE:  # a rank with an empty part sends nothing
            return self.length >= ranks
        return self.operation in _SYNCHRONOUS

    def text(self, unit_names: Sequence[str]) -> str:
        """Return the text of an error, such as "gathers unit blocks.3"."""
        return _VERBS[self.operation] + (f" unit {unit_names[self.unit]}" if self.unit is not None else "")


WORDS = len(Announcement(Operation.BARRIER).words())
"""Number of integers of an announcement."""


def flag_words(count: int) -> int:
    """Return the number of words for `count` flags."""
    return -(-count // _FLAGS)


def pack_flags(members: Iterable[int], words: int) -> list[int]:
    """Pack a set of small numbers into `words` integers."""
    flags = [0] * words
    for member in members:
        flags[member // _FLAGS] |= 1 << member % _FLAGS
    return flags


def unpack_flags(words: Sequence[int]) -> set[int]:
    """Return the set that `pack_flags` packed."""
    return {
        number * _FLAGS + bit for number, word in enumerate(words) if word for bit in range(_FLAGS) if word >> bit & 1
    }
