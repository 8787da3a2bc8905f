"""The two slots of durable extents, beside a model that keeps whole contents."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from infinity.plan.io import Durable, plan_durable
from infinity.plan.placement import Extent, Placement, State
from infinity.tier_kind import TierKind
from infinity.tiers.slots import Slots
from support.locked import locked

BLOCK = 4096
SIZES = (3 * BLOCK, BLOCK, 5 * BLOCK)
Locked = locked(Slots, "_pairs")


def planned() -> tuple[Durable, ...]:
    extents, offset = {}, 0
    for number, nbytes in enumerate(SIZES):
        extents[number, State.OPTIM] = Extent(TierKind.NVME, offset, nbytes, f"unit {number}")
        offset += 1 << 16
    return plan_durable("run", Placement(extents, {"nvme": offset}, {}, {}), offset).extents


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 5)),
            st.sampled_from(["commit", "crash"]),
        ),
        max_size=40,
    )
)
def test_slots_show_the_last_bytes_and_keep_the_committed_ones(events: list[tuple[int, int, int] | str]) -> None:
    extents = planned()
    slots = Locked(extents, None)
    assert slots.are_committed
    file: dict[int, int] = {}  # offset of a block → its content
    present = [[0] * (nbytes // BLOCK) for nbytes in SIZES]
    committed = [list(blocks) for blocks in present]
    sealed = bytes([1] * len(extents))
    content = 0
    for event in events:
        if event == "commit":
            for piece, place in slots.missing():
                for block in range(0, piece.nbytes, BLOCK):
                    file[place + block] = file.get(piece.offset + block, 0)
            slots.complete()
            sealed = slots.seal()
            slots.commit(sealed)
            committed = [list(blocks) for blocks in present]
        elif event == "crash":
            slots = Locked(extents, sealed)
            present = [list(blocks) for blocks in committed]
        else:
            number, start, length = event
            first, stop = min(start, len(present[number])), min(start + length, len(present[number]))
            if first < stop:
                place = slots.to_write(extents[number].first.offset, first * BLOCK, (stop - first) * BLOCK)
                for block in range(first, stop):
                    content += 1
                    file[place + (block - first) * BLOCK] = present[number][block] = content
        for each, blocks in zip(extents, present, strict=True):
            read = [
                file.get(piece.offset + block, 0)
                for piece in slots.to_read(each.first.offset, 0, each.first.nbytes)
                for block in range(0, piece.nbytes, BLOCK)
            ]
            assert read == blocks
        for each, slot, blocks in zip(extents, sealed, committed, strict=True):
            place = (each.first, each.second)[slot].offset
            assert [file.get(place + block, 0) for block in range(0, each.first.nbytes, BLOCK)] == blocks


def test_slots_of_a_plan_do_not_overlap() -> None:
    used = sorted(
        (place.offset, place.offset + place.nbytes) for each in planned() for place in (each.first, each.second)
    )
    assert all(stop <= start for (_, stop), (start, _) in pairwise(used))


def test_a_read_beside_a_commit_takes_no_bytes_that_are_still_copied() -> None:
    """Training reads states while a commit completes those that were written in part."""
    (extent, *_) = planned()
    slots = Slots([extent], None)
    slots.to_write(extent.first.offset, 0, extent.first.nbytes)
    slots.commit(slots.seal())
    new = slots.to_write(extent.first.offset, 0, BLOCK)
    ((piece, place),) = slots.missing()
    assert (piece.offset, place) == (extent.first.offset + BLOCK, new + BLOCK)
    read = [(found.offset, found.nbytes) for found in slots.to_read(extent.first.offset, 0, extent.first.nbytes)]
    assert read == [(new, BLOCK), (piece.offset, piece.nbytes)]
    slots.complete()
    assert [found.offset for found in slots.to_read(extent.first.offset, 0, extent.first.nbytes)] == [new]
