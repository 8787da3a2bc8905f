"""Buffer classes: never fewer buffers than units may need at once, in the fewest bytes."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, strategies as st

from infinity.plan.pools import size_classes

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9)


def fits(classes: dict[int, int], together: tuple[int, ...]) -> bool:
    """Return True if units of these sizes get a buffer each, every unit the smallest that fits."""
    left = dict(classes)
    for size in together:
        chosen = min((c for c in left if c >= size), default=None)
        if chosen is None or left[chosen] == 0:
            return False
        left[chosen] -= 1
    return True


@given(SIZES, st.integers(1, 5))
def test_any_units_fit_together(sizes: list[int], depth: int) -> None:
    """Any `depth` units fit together."""
    classes = size_classes(sizes, depth)
    assert all(fits(classes, together) for together in combinations(sizes, min(depth, len(sizes))))
    assert max(classes) == max(sizes)
    assert sum(classes.values()) <= len(sizes)


@given(SIZES, st.integers(1, 5), st.integers(0, 3), st.data())
def test_what_is_held_together_fits(sizes: list[int], depth: int, beside: int, data: st.DataObject) -> None:
    """Units held together fit along with any `beside` others, and any `depth` units still fit."""
    chains = data.draw(st.lists(st.sets(st.integers(0, len(sizes) - 1), min_size=1), max_size=3))
    classes = size_classes(sizes, depth, [[sizes[unit] for unit in chain] for chain in chains], beside)
    for chain in chains:
        others = [unit for unit in range(len(sizes)) if unit not in chain]
        for added in combinations(others, min(beside, len(others))):
            assert fits(classes, tuple(sizes[unit] for unit in (*chain, *added)))
    assert all(fits(classes, together) for together in combinations(sizes, min(depth, len(sizes))))
    assert sum(classes.values()) <= len(sizes)


def test_few_that_are_held_together_change_nothing() -> None:
    """Sets of at most `depth` units with those beside them, as a block and its parent, change no count."""
    assert size_classes([100] * 24 + [30] * 2, 5, [[30, 100], [30, 100]], 3) == {100: 5}


def cheapest(sizes: list[int], depth: int) -> int:
    """Return the least bytes over all ways to cut the sorted sizes into classes."""
    ordered = sorted(sizes)
    best = None
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            bounds = [0, *cuts, len(ordered)]
            groups = [ordered[low:high] for low, high in pairwise(bounds)]
            cost = sum(min(len(group), depth) * group[-1] for group in groups)
            best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@given(SIZES, st.integers(1, 5))
def test_no_other_classes_are_smaller(sizes: list[int], depth: int) -> None:
    found = sum(size * count for size, count in size_classes(sizes, depth).items())
    assert found <= cheapest(sizes, depth)


def test_equal_blocks_share_one_class() -> None:
    assert size_classes([100] * 24 + [30] * 2, 5) == {100: 5}  # the small ones take turns with the large
    assert size_classes([100] * 3 + [30] * 3, 5) == {100: 3, 30: 3}
    assert size_classes([], 3) == {}
