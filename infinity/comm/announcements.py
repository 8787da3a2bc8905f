"""Announcements: descriptions of collectives, which ranks compare, since different collectives would deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from infinity.rules import MOMENT_NAMES

_FLAGS = 62
"""Flags in an exchanged word, an int64."""


class Operation(IntEnum):
    """Collectives of a communicator, and calls that all ranks begin together."""

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
    SAVE_CHECKPOINT = 10
    LOAD_CHECKPOINT = 11
    SAVE_WEIGHTS = 12
    READ_STATE_DICT = 13
    READ_STATE = 14
    WRITE_STATE = 15


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
    Operation.SAVE_CHECKPOINT: "saves a checkpoint",
    Operation.LOAD_CHECKPOINT: "loads a checkpoint",
    Operation.SAVE_WEIGHTS: "saves the model's weights",
    Operation.READ_STATE_DICT: "reads the state dict",
    Operation.READ_STATE: "reads",
    Operation.WRITE_STATE: "sets",
}


CALLS = frozenset(operation for operation in Operation if operation >= Operation.SAVE_CHECKPOINT)
"""Calls of the script, which exchange nothing."""
_SYNCHRONOUS = frozenset(Operation) - CALLS - {Operation.BROADCAST, Operation.GIVE_UP}
_STATES = ("master", "gradient", *dict.fromkeys(chain(*MOMENT_NAMES.values())))
"""Names of a parameter's states, which an announcement counts."""


@dataclass(frozen=True)
class Announcement:
    """A collective that a rank is about to issue. All ranks issue it if theirs are equal."""

    operation: Operation
    unit: int | None = None
    length: int = 0
    """Number of exchanged elements, for collectives without a unit; the number of a state in its unit (`of_state`)."""

    def words(self) -> list[int]:
        """Return the announcement as integers, for an all-gather."""
        return [self.operation, -1 if self.unit is None else self.unit, self.length]

    @classmethod
    def of(cls, words: Sequence[int]) -> Announcement:
        operation, unit, length = words
        return cls(Operation(operation), None if unit < 0 else unit, length)

    @classmethod
    def of_state(cls, operation: Operation, unit: int, slot: int, state: str) -> Announcement:
        """Return the announcement of a call for a parameter's state, such as "exp_avg"."""
        return cls(operation, unit, slot * len(_STATES) + _STATES.index(state))

    def is_synchronous(self, ranks: int) -> bool:
        """Return whether no rank can end this collective before all of `ranks` have begun it."""
        if self.operation is Operation.ALL_GATHER_STATE:  # a rank with an empty part sends nothing
            return self.length >= ranks
        return self.operation in _SYNCHRONOUS

    def text(self, unit_names: Sequence[str]) -> str:
        """Return the text of an error, such as "gathers unit blocks.3"."""
        verb = _VERBS[self.operation]
        if self.unit is None:
            return verb
        if self.operation in CALLS:
            slot, state = divmod(self.length, len(_STATES))
            return f"{verb} {_STATES[state]} of parameter {slot + 1} in unit {unit_names[self.unit]}"
        return f"{verb} unit {unit_names[self.unit]}"


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
