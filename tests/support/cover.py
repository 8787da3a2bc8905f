"""Few of many combinations, such that every value, or every two values of two factors, still occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairwise_cover(cases: Sequence[Case], cost: Callable[[Case], float] = lambda _: 1.0) -> list[Case]:
    """A part of `cases`, tuples of one value for each factor, in which every pair of values occurs that occurs in all.

    Greedy: the case with the most new pairs for its cost first.
    """
    pairs = {case: _parts(case, 2) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing) / cost(case))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def value_cover(cases: Sequence[Case]) -> list[Case]:
    """A part of `cases` in which every value of every factor occurs that occurs in all.

    Greedy: the case with the most new values first; of equal ones that whose values were chosen least, so that values
    meet in turn: a×1, b×2, c×1.
    """
    uses: Counter[tuple[int, Hashable]] = Counter()
    missing = {value for case in cases for value in _parts(case, 1)}
    left, chosen = list(cases), []
    while missing:
        best = max(left, key=lambda case: (len(missing & _parts(case, 1)), -sum(uses[v] for v in enumerate(case))))
        left.remove(best)
        chosen.append(best)
        uses.update(enumerate(best))
        missing -= _parts(best, 1)
    return chosen


def _parts(case: Case, size: int) -> set[tuple[Any, ...]]:
    """Return all `size` values together, with their factors; of a case with fewer factors, the whole case."""
    return set(combinations(enumerate(case), min(size, len(case))))
