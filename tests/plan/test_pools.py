"""Buffer classes: never fewer buffers than units may need at once, in the fewest bytes."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from infinity.config import Config
from infinity.plan.layout import Discovered, DiscoveredUnit, Member
from infinity.plan.plan import lay_out
from infinity.plan.policy import DeviceInfo, RankInfo, policy
from infinity.plan.pools import _in_flight, size_classes, unit_pool

ALONE = 1, RankInfo(), DeviceInfo()
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


@given(SIZES, st.integers(1, 5), st.data())
def test_what_is_together_fits(sizes: list[int], depth: int, data: st.DataObject) -> None:
    """Each set of units that have a buffer at once fits, and any `depth` units still fit."""
    sets = data.draw(st.lists(st.sets(st.integers(0, len(sizes) - 1), min_size=1), max_size=3))
    classes = size_classes(sizes, depth, [[sizes[unit] for unit in one] for one in sets])
    assert all(fits(classes, tuple(sizes[unit] for unit in one)) for one in sets)
    assert all(fits(classes, together) for together in combinations(sizes, min(depth, len(sizes))))
    assert sum(classes.values()) <= len(sizes)


@given(SIZES, st.data())
def test_large_units_fit_where_they_are_together(sizes: list[int], data: st.DataObject) -> None:
    """Each set of large units fits, and each unit alone; others take turns."""
    sizes = [size << 20 for size in sizes]
    sets = data.draw(st.lists(st.sets(st.integers(0, len(sizes) - 1), min_size=1), max_size=3))
    classes = size_classes(sizes, 4, [[sizes[unit] for unit in one] for one in sets])
    assert all(fits(classes, tuple(sizes[unit] for unit in one)) for one in sets)
    assert all(fits(classes, (size,)) for size in sizes)
    assert size_classes([100 << 20, *[90 << 20] * 8, 100 << 20], 4, [[90 << 20]]) == {100 << 20: 1}


def test_few_that_are_together_change_nothing() -> None:
    """Sets of at most `depth` small units change no count."""
    assert size_classes([100] * 24 + [30] * 2, 5, [[30, 100], [30, 100]]) == {100: 5}


def test_a_tiny_unit_takes_no_buffer_of_a_large_one() -> None:
    assert size_classes([100] * 24 + [30] * 2 + [6] * 9, 5) == {100: 5, 6: 5}
    assert size_classes([96] * 24 + [6], 5) == {96: 5}


def cheapest(sizes: list[int], depth: int) -> int:
    """Return the least bytes over all ways to cut the sorted sizes into classes without tiny units."""
    ordered = sorted(sizes)
    best = None
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            bounds = [0, *cuts, len(ordered)]
            groups = [ordered[low:high] for low, high in pairwise(bounds)]
            if any(group[0] * 16 < group[-1] for group in groups):
                continue
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


LINEAR, NORM, BLOCK, OUTER = 64 << 10, 2 << 10, 4, 8
"""Elements of the units of a block, and numbers of units and blocks."""


def units_of(layers: int = OUTER) -> Discovered:
    """Return `layers` blocks of a tiny unit and three linears each."""
    sizes = [NORM, LINEAR, LINEAR, LINEAR] * layers
    members = [(Member(f"{number}", (size,), 0),) for number, size in enumerate(sizes)]
    units = tuple(DiscoveredUnit(one[0].name, torch.float32, True, one) for one in members)
    held = frozenset(frozenset({first, first + inner}) for first in range(0, len(sizes), BLOCK) for inner in (1, 2, 3))
    every = frozenset(frozenset(range(first, first + BLOCK)) for first in range(0, len(sizes), BLOCK))
    return Discovered(units, held, every)


def planned(**infinity: object) -> tuple[dict[int, int], int]:
    """Return the buffers of units, by their bytes, and the bytes of units ahead."""
    config = Config.load({"train_batch_size": 1, "infinity": {"cache_bytes": 0, **infinity}})
    discovered = units_of()
    pool, ahead = unit_pool(config, discovered, lay_out(discovered, None, 1), policy(config, *ALONE))
    return dict(pool.sizes), ahead


def test_a_whole_block_fits_ahead() -> None:
    """The buffers suffice for the unit in use, the next block and a unit that is updated."""
    buffers, ahead = planned()
    assert ahead >= 4 * (NORM + 3 * LINEAR)
    assert buffers == {4 * LINEAR: 1 + 3 + 1, 4 * NORM: 1 + 1 + 1}


def test_one_more_of_each_size_is_leaving() -> None:
    """A size with one buffer, or with one for each unit, has no more."""
    config = Config.load({"train_batch_size": 1, "infinity": {"cache_bytes": 0}})
    sizes = [64 * LINEAR, *[LINEAR] * 20, NORM, NORM, 64 * LINEAR]
    members = [(Member(f"{number}", (size,), 0),) for number, size in enumerate(sizes)]
    units = tuple(DiscoveredUnit(one[0].name, torch.float32, True, one) for one in members)
    discovered = Discovered(units, frozenset(), frozenset())
    given = config, discovered, lay_out(discovered, None, 1), policy(config, *ALONE)
    before, after = (dict(unit_pool(*given, leaves_late=late)[0].sizes) for late in (False, True))
    assert after == {**before, 4 * LINEAR: before[4 * LINEAR] + 1}
    assert before[256 * LINEAR] == 1 and before[4 * NORM] == 2


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_prefetch_is_spent_in_bytes(blocks: int) -> None:
    """Tiny units take no buffer of the units ahead."""
    asked = 4 * blocks * (NORM + 3 * LINEAR)
    buffers, ahead = planned(prefetch_bytes=asked)
    assert ahead == asked
    assert buffers[4 * LINEAR] == 1 + 3 * blocks + 1


def limited(room: int, **infinity: object) -> tuple[int, int]:
    """Return the bytes of the buffers of units, and those ahead."""
    config = Config.load({"train_batch_size": 1, "infinity": {"cache_bytes": 0, **infinity}})
    discovered = units_of()
    layouts = lay_out(discovered, None, 1)
    pool, ahead = unit_pool(config, discovered, layouts, policy(config, *ALONE), room)
    return pool.nbytes, ahead


def test_the_depth_ahead_is_the_largest_that_fits_in_half_of_the_room() -> None:
    whole, block = limited(1 << 40)
    before = whole, block
    for room in range(2 * whole, 0, -4 * LINEAR):
        nbytes, ahead = limited(room)
        assert nbytes <= room // 2 or ahead == 4 * LINEAR  # at least one unit ahead
        assert (nbytes, ahead) <= before
        before = nbytes, ahead
    assert limited(2 * whole) == (whole, block)
    assert limited(2 * whole - 1)[1] < block


def test_an_explicit_depth_ahead_does_not_depend_on_the_room() -> None:
    assert limited(1, prefetch_bytes=8 * LINEAR) == limited(1 << 40, prefetch_bytes=8 * LINEAR)


def test_small_buffers_between_threads_are_many() -> None:
    """Sixteen times as many, as long as they take 1 MiB at most; none more in debug mode."""
    assert [_in_flight(4, nbytes, debug=False) for nbytes in (8 << 10, 64 << 10, 1 << 20)] == [64, 16, 4]
    assert _in_flight(4, 8 << 10, debug=True) == 4
