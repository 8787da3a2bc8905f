"""Free ranges are disjoint, joined, and never cross a wall."""

from __future__ import annotations

from hypothesis import given, strategies as st

from infinity.activations.disk import Ranges

WALL = 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60))
def test_ranges_are_what_was_freed_and_not_taken(actions: list[tuple[bool, int, int]]) -> None:
    """Two files of 40 bytes; a model keeps the set of used bytes."""
    ranges = Ranges()
    for _ in range(2):
        start = ranges.grow(WALL)
        ranges.free(start, WALL, walls=(start, start + WALL))
    used: list[tuple[int, int]] = []
    for takes, nbytes, choice in actions:
        if takes:
            free = [byte for byte in range(2 * WALL) if not any(s <= byte < s + n for s, n in used)]
            fits = any(
                set(range(byte, byte + nbytes)) <= set(free) and byte // WALL == (byte + nbytes - 1) // WALL
                for byte in free
            )
            start_or_none = ranges.take(nbytes)
            assert (start_or_none is not None) == fits
            if start_or_none is not None:
                assert set(range(start_or_none, start_or_none + nbytes)) <= set(free)
                assert start_or_none // WALL == (start_or_none + nbytes - 1) // WALL
                used.append((start_or_none, nbytes))
        elif used:
            start, size = used.pop(choice % len(used))
            first = start // WALL * WALL
            ranges.free(start, size, walls=(first, first + WALL))
    for start, size in used:
        first = start // WALL * WALL
        ranges.free(start, size, walls=(first, first + WALL))
    assert [ranges.take(WALL), ranges.take(WALL), ranges.take(1)].count(None) == 1


def test_the_smallest_fitting_range_is_taken() -> None:
    ranges = Ranges()
    ranges.grow(100)
    ranges.free(0, 50)
    ranges.free(60, 10)
    assert ranges.take(10) == 60
    assert ranges.take(10) == 0
