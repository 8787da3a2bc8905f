"""Sources of choices: an integer seed, or hypothesis. `fuzz.case` is written once against both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

Choice = TypeVar("Choice")


class Draw(Protocol):
    """Makes every choice of a case. The first option of a choice is the simplest: hypothesis shrinks towards it."""

    def choice(self, options: Sequence[Choice]) -> Choice: ...

    def integer(self, low: int, high: int) -> int:
        """low to high, both included."""
        ...


class SeededDraw:
    """The same choices for the same seed, on every machine and Python: only `random.random()` is used, which is
    specified.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choice(self, options: Sequence[Choice]) -> Choice:
        return options[self.integer(0, len(options) - 1)]

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))


class HypothesisDraw:
    """Choices of a hypothesis strategy, so that a failing case is shrunk."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def choice(self, options: Sequence[Choice]) -> Choice:
        chosen: Choice = self._draw(st.sampled_from(options))
        return chosen

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))


def flag(draw: Draw, out_of: int) -> bool:
    """True once in `out_of` draws."""
    return draw.integer(0, out_of - 1) == out_of - 1
