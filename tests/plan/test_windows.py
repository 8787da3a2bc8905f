"""Units of rules in Python: no shard boundary cuts a parameter, and windows and records cover them without overlap."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, strategies as st

from infinity.plan.formats import RECORD_ALIGNMENT
from infinity.plan.layout import SHARD_ALIGNMENT, Member, UnitLayout, layout_unit
from infinity.plan.placement import EXTENT_ALIGNMENT, unit_tiles
from infinity.plan.records import Field, States, record_of
from infinity.plan.windows import RecordsFormat

SHAPES = st.lists(st.lists(st.integers(0, 300), max_size=3).map(tuple), min_size=1, max_size=12)


def laid_out(shapes: list[tuple[int, ...]], ranks: int, dtype: torch.dtype = torch.bfloat16) -> UnitLayout:
    members = []
    for number, shape in enumerate(shapes):
        first = States((Field("step", torch.float32, ()), Field("exp_avg", torch.float32, shape)), tree=0)
        later = States((*first.fields, Field("rows", torch.float64, shape[:1])), tree=1)
        record = record_of(shape, (first, later), has_master=dtype != torch.float32)
        members.append(Member(str(number), shape, group=number % 2, record=record))
    return layout_unit(0, "unit", members, dtype, True, ranks)


@given(SHAPES, st.integers(1, 9))
def test_parameters_are_whole(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = laid_out(shapes, ranks)
    assert sorted(slot.name for slot in layout.slots) == sorted(str(n) for n in range(len(shapes)))
    assert layout.shard_numel % SHARD_ALIGNMENT == 0
    end = last = 0
    for window in layout.windows:
        assert window.start == end and window.first == last
        assert window.start // layout.shard_numel == (window.stop - 1) // layout.shard_numel
        for slot in layout.slots[window.first : window.last]:
            assert window.start <= slot.offset and slot.stop <= window.stop
        end, last = window.stop, window.last
    assert (end, last) == (layout.numel, len(layout.slots))
    assert layout.end == laid_out(shapes, 1).end


@given(SHAPES, st.integers(1, 9))
def test_the_longest_shard_is_near_the_mean_or_the_largest_parameter(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """Graham's bound for the order by size: the mean and a third of the largest, before windows are aligned."""
    layout = laid_out(shapes, ranks)
    sizes = [-(-prod(shape) // 256) * 256 for shape in shapes]
    aligned = 32768 * len(layout.windows) + SHARD_ALIGNMENT
    assert layout.shard_numel <= max(sum(sizes) / ranks + max(sizes), 1) + aligned


@given(SHAPES, st.integers(1, 5))
def test_records_have_places_of_their_own(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = laid_out(shapes, ranks)
    form = RecordsFormat(layout)
    memory = torch.zeros(form.shard_nbytes * ranks, dtype=torch.uint8)
    for number, slot in enumerate(layout.slots):
        assert slot.record is not None
        assert form.places[number] // form.shard_nbytes == slot.offset // layout.shard_numel
        record = form.of(memory, number)
        assert not record.any()
        record.fill_(number + 1)
    seen = set()
    for rank in range(ranks):
        tiles = unit_tiles(layout, rank, 0, form)
        assert tiles
        end = 0
        for tile, _, records in tiles:
            assert tile.start * layout.dtype.itemsize % EXTENT_ALIGNMENT == 0 and tile.offset % EXTENT_ALIGNMENT == 0
            assert tile.offset >= end and tile.nbytes % RECORD_ALIGNMENT == 0 and tile.nbytes
            end = tile.offset + tile.nbytes
            for number, first in records.items():
                assert rank * form.shard_nbytes + tile.offset + first == form.places[number]
                seen.add(number)
        assert end <= form.shard_nbytes
    assert seen == set(range(len(layout.slots)))


def test_a_state_keeps_its_place() -> None:
    slot = laid_out([(4, 3)], 1).slots[0]
    assert slot.record is not None
    first, later = slot.record.after
    assert later.fields[:2] == first.fields
    assert [each.first % 64 for each in later.fields] == [0, 0, 0]
    assert slot.record.states(0).fields == () and slot.record.states(7) == later
