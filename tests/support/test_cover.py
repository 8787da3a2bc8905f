"""Covers keep every value, or every pair of values, and at least one case."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest

from support.cover import pairwise_cover, value_cover


@pytest.mark.parametrize(("cover", "together"), [(value_cover, 1), (pairwise_cover, 2)])
@pytest.mark.parametrize("factors", [0, 1, 2, 4])
def test_covers_keep_every_combination_of_so_many_values(
    cover: Callable[[Any], Any], together: int, factors: int
) -> None:
    """A test without parameters is one case without factors, which stays."""
    cases = list(product("abc", repeat=factors))
    chosen = cover(cases)
    assert set(chosen) <= set(cases) and len(chosen) == len(set(chosen)) >= 1

    def covered(some: list[Any]) -> set[Any]:
        return {part for case in some for part in combinations(enumerate(case), min(together, factors))}

    assert covered(chosen) == covered(cases)
    assert factors <= together or len(chosen) < len(cases)
