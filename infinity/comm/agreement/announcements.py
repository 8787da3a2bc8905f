"""Announcements: descriptions of collectives, which ranks compare, since different collectives would deadlock.

Agreed collectives of one communicator, and the prediction of the next one.

The prediction depends on agreed collectives alone, so that all ranks predict the same without a message.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from infinity.plan.layout import UnitLayout
from infinity.rules import RULES

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
    EXCHANGE = 10
    DISCARD_EDITS = 11
    SAVE_CHECKPOINT = 12
    LOAD_CHECKPOINT = 13
    SAVE_WEIGHTS = 14
    READ_STATE_DICT = 15
    READ_OPTIMIZER = 16
    LOAD_OPTIMIZER = 17
    LOAD_PARAMETERS = 18
    GATHER_PARAMETERS = 19
    READ_STATE = 20
    WRITE_STATE = 21
    STREAM_WEIGHTS = 22
    STREAM_TENSOR = 23


_VERBS = {
    Operation.ALL_GATHER: "gathers",
    Operation.REDUCE: "reduces the gradient of",
    Operation.ALL_GATHER_STATE: "gathers a state",
    Operation.BROADCAST: "broadcasts",
    Operation.SUM: "sums numbers of a step",
    Operation.READ_STATES: "reads states",
    Operation.REFRESH_VIEWS: "refreshes views",
    Operation.BARRIER: "waits for all",
    Operation.GIVE_UP: "gives up",
    Operation.COMPARE_BATCHES: "compares the first batches",
    Operation.EXCHANGE: "exchanges objects",
    Operation.DISCARD_EDITS: "discards edits",
    Operation.STREAM_TENSOR: "streams a tensor",
}

_FUNCTIONS = {
    Operation.SAVE_CHECKPOINT: "save_checkpoint",
    Operation.LOAD_CHECKPOINT: "load_checkpoint",
    Operation.SAVE_WEIGHTS: "save_16bit_model",
    Operation.READ_STATE_DICT: "state_dict",
    Operation.READ_OPTIMIZER: "optimizer.state_dict",
    Operation.LOAD_OPTIMIZER: "optimizer.load_state_dict",
    Operation.LOAD_PARAMETERS: "load_with",
    Operation.GATHER_PARAMETERS: "GatheredParameters",
    Operation.READ_STATE: "get_full",
    Operation.WRITE_STATE: "set_full",
    Operation.STREAM_WEIGHTS: "stream_weights",
}
"""Functions that the script called; those of states begin with these words."""
_OF_STATE = {"master": "fp32_param", "gradient": "grad"}
"""State → end of the functions that read and set it; others are the optimizer's."""

CALLS = frozenset(_FUNCTIONS)
"""Calls of the script, which exchange nothing."""
# A new operation counts as synchronous. Leave it out here if a rank can end it before another begins it.
_SYNCHRONOUS = frozenset(Operation) - CALLS - {Operation.BROADCAST, Operation.GIVE_UP}
_STATES = ("master", "gradient", *dict.fromkeys(chain(*(rule.moments for rule in RULES.values()))), "another state")
"""Names of a parameter's states, which an announcement counts. The last one stands for those of rules in Python."""
_COUNT = 32
"""Lowest bit of the number of units in the length of a call for several."""


@dataclass(frozen=True)
class Announcement:
    """A collective that a rank is about to issue. All ranks issue it if theirs are equal."""

    operation: Operation
    unit: int | None = None
    length: int = 0
    """Number of exchanged elements, for collectives without a unit; source of a unit's broadcast; number of a state in
    its unit (`of_state`); number of units, and a digest (`of_units`).
    """

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
        name = state if state in _STATES else _STATES[-1]
        return cls(operation, unit, slot * len(_STATES) + _STATES.index(name))

    @classmethod
    def of_units(cls, operation: Operation, units: Sequence[int], source: int | None = None) -> Announcement:
        """Return the announcement of a call for one or more units. source: rank whose values it broadcasts, if any."""
        # Not `hash`, which differs between processes for text.
        digest = zlib.crc32(repr((source, *units)).encode())
        return cls(operation, units[0], len(units) << _COUNT | digest)

    def is_synchronous(self, ranks: int) -> bool:
        """Return whether no rank can end this collective before all of `ranks` have begun it."""
        if self.operation is Operation.ALL_GATHER_STATE:  # a rank with an empty part sends nothing
            return self.length >= ranks
        return self.operation in _SYNCHRONOUS

    @property
    def function(self) -> str:
        """The function of the script that issues this, such as "save_checkpoint()"; empty if training issues it."""
        if self.operation is Operation.DISCARD_EDITS or (
            self.operation is Operation.BROADCAST and self.unit is not None
        ):
            return "GatheredParameters()"  # at its end
        name = _FUNCTIONS.get(self.operation, "")
        if self._names_state:
            name = f"{name}_{_OF_STATE.get(self._state, 'optimizer_state')}"
        return name and f"{name}()"

    @property
    def _names_state(self) -> bool:
        return self.operation in (Operation.READ_STATE, Operation.WRITE_STATE)

    @property
    def _state(self) -> str:
        return _STATES[self.length % len(_STATES)]

    def text(self, units: Sequence[UnitLayout]) -> str:
        """Return the text of an error, such as "gathers unit blocks.3"."""
        verb = _VERBS.get(self.operation) or f"calls {self.function}"
        if self.unit is None:
            return verb
        layout = units[self.unit]
        unit = f"unit {layout.name}"
        if self._names_state:
            parameter = layout.slots[self.length // len(_STATES)].name
            return f"{verb} for {parameter if self._state in _OF_STATE else f'{self._state} of {parameter}'} in {unit}"
        if self.operation is Operation.GATHER_PARAMETERS:
            others = (self.length >> _COUNT) - 1
            return f"{verb} for {unit}" + (f" and {others} more" if others else "")
        if self.operation is Operation.BROADCAST:
            return f"{verb} rank {self.length}'s values of {unit}"
        return f"{verb} {unit}"


WORDS = len(Announcement(Operation.BARRIER).words())
"""Number of integers of an announcement."""


def flag_words(count: int) -> int:
    """Return the number of words for `count` flags."""
    return -(-count // _FLAGS)


def pack_flags(members: Iterable[int], words: int) -> list[int]:
    """Pack a set of small numbers into `words` integers."""
    flags = [0] * words
    for member in members:
        # Fewer bits than a word has: words travel as signed integers.
        flags[member // _FLAGS] |= 1 << member % _FLAGS
    return flags


def unpack_flags(words: Sequence[int]) -> set[int]:
    """Return the set that `pack_flags` packed."""
    return {
        number * _FLAGS + bit for number, word in enumerate(words) if word for bit in range(_FLAGS) if word >> bit & 1
    }


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
