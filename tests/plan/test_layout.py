"""Layouts for any shapes, groups and ranks: no overlap, correct alignment, and runs that cover the requested slots."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings, strategies as st

from infinity.plan.layout import SHARD_ALIGNMENT, SLOT_ALIGNMENT, Member, UnitLayout, layout_unit, round_up

SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> UnitLayout:
    shapes = draw(st.lists(st.tuples(SHAPES, st.integers(-1, 2)), min_size=1, max_size=12))
    members = [Member(f"p{number}", shape, group) for number, (shape, group) in enumerate(shapes)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return layout_unit(0, "unit", members, dtype, True, draw(st.sampled_from([1, 2, 3, 8])))


@given(layouts())
def test_slots_are_aligned_and_apart(layout: UnitLayout) -> None:
    for slot in layout.slots:
        assert slot.offset % SLOT_ALIGNMENT == 0 and slot.numel == prod(slot.shape)
    for first, second in pairwise(layout.slots):
        assert first.stop <= second.offset < first.stop + SLOT_ALIGNMENT or first.numel == 0
        assert first.group <= second.group
    assert layout.slots[-1].stop <= layout.numel
    assert layout.parameter_numel == sum(slot.numel for slot in layout.slots)


@given(layouts())
def test_shards_divide_the_unit_into_whole_blocks(layout: UnitLayout) -> None:
    assert layout.shard_numel * layout.world_size == layout.numel
    assert layout.shard_numel % SHARD_ALIGNMENT == 0
    assert layout.shard_nbytes % 4096 == 0
    ranges = [layout.shard_range(rank) for rank in range(layout.world_size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.numel
    assert all(first[1] == second[0] for first, second in pairwise(ranges))
    needed = round_up(layout.slots[-1].stop, SLOT_ALIGNMENT)
    assert layout.numel < max(needed, 1) + SHARD_ALIGNMENT * layout.world_size


@given(layouts(), st.data())
@settings(max_examples=200)
def test_runs_hold_the_elements_of_the_slots_given(layout: UnitLayout, data: st.DataObject) -> None:
    """Each element of a requested slot is in the one run of its group and step; other elements are in none."""
    every = st.integers(0, len(layout.slots) - 1)
    steps = {slot: data.draw(st.integers(1, 3)) for slot in data.draw(st.sets(every))}
    expected: list[tuple[int, int] | None] = [None] * layout.numel
    for number, slot in enumerate(layout.slots):
        if number in steps and slot.group >= 0:
            for element in range(slot.offset, slot.stop):
                expected[element] = (slot.group, steps[number])
    found: list[tuple[int, int] | None] = [None] * layout.numel
    for rank in range(layout.world_size):
        low, _ = layout.shard_range(rank)
        runs = layout.runs(rank, steps)
        for run in runs:
            assert 0 <= run.start < run.stop <= layout.shard_numel
            for element in range(low + run.start, low + run.stop):
                assert found[element] is None
                found[element] = (run.group, run.step)
        for first, second in pairwise(runs):
            assert first.stop <= second.start
            assert first.stop < second.start or (first.group, first.step) != (second.group, second.step)
    for element, wanted in enumerate(expected):
        if wanted is not None:
            assert found[element] == wanted
    padding = {element for start, stop in layout.gaps for element in range(start, stop)}
    assert all(wanted is not None or element in padding for element, wanted in enumerate(expected) if found[element])


@given(layouts())
def test_gaps_and_slots_cover_the_unit(layout: UnitLayout) -> None:
    covered = [0] * layout.numel
    for start, stop in layout.gaps:
        assert start < stop
        for element in range(start, stop):
            covered[element] += 1
    for slot in layout.slots:
        for element in range(slot.offset, slot.stop):
            covered[element] += 1
    assert set(covered) <= {1}


@given(layouts(), st.data())
def test_the_slot_at_an_element(layout: UnitLayout, data: st.DataObject) -> None:
    slots = [number for number, slot in enumerate(layout.slots) if slot.numel]
    if slots:
        number = data.draw(st.sampled_from(slots))
        slot = layout.slots[number]
        assert layout.slot_at(data.draw(st.integers(slot.offset, slot.stop - 1))) == number


@given(layouts())
def test_parts_are_the_slots_of_every_shard(layout: UnitLayout) -> None:
    found = [0] * layout.numel
    for rank in range(layout.world_size):
        low, _ = layout.shard_range(rank)
        parts = layout.parts(rank)
        assert parts == sorted(parts) and all(0 <= part.start < part.stop <= layout.shard_numel for part in parts)
        for part in parts:
            for element in range(low + part.start, low + part.stop):
                found[element] += 1
    wanted = [0] * layout.numel
    for slot in layout.slots:
        wanted[slot.offset : slot.stop] = [1] * slot.numel
    assert found == wanted


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_elements_are_numbered_through_the_model_on_any_number_of_ranks(sizes: list[int], ranks: int) -> None:
    """The numbers are the same for any division into units, too."""
    first = 0
    units = []
    for index, size in enumerate(sizes):
        units.append(layout_unit(index, "unit", [Member("p", (size,), 0)], torch.float32, True, ranks, first))
        first = units[-1].end
    together = layout_unit(
        0, "unit", [Member(f"p{i}", (size,), 0) for i, size in enumerate(sizes)], torch.float32, True, 1
    )
    assert [unit.first for unit in units] == [slot.offset for slot in together.slots]
    assert all(unit.first % SLOT_ALIGNMENT == 0 for unit in units)
