"""Few of many combinations, so that every two values of two factors still meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[object, ...])


def pairwise_cover(cases: Sequence[Case], cost: Callable[[Case], float] = lambda _: 1.0) -> list[Case]:
    """A part of `cases`, tuples of one value for each factor, in which every pair of values occurs that occurs in all.

    Greedy: the case with the most new pairs for its cost first.
    """
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing) / cost(case))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
