"""Placement: every state of every unit has its own aligned extent on its tier, and tiles cover it without a gap."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from infinity.plan.formats import GradDtypes, StateFormat, state_format
from infinity.plan.layout import Member, UnitLayout, layout_unit
from infinity.plan.placement import EXTENT_ALIGNMENT, Policy, State, place, tiles
from infinity.tier_kind import TierKind

TIERS = st.sampled_from(TierKind)
MASTERS = st.sampled_from(["remainder", "fp32"])
RULES = st.sampled_from(["adamw", "adagrad", "lion", "sgd"])
MOMENTS = st.sampled_from(["fp32", "bf16", "8bit"])
FORMATS = st.builds(
    state_format, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), MASTERS, RULES, MOMENTS
)


@st.composite
def units(draw: st.DrawFn) -> list[UnitLayout]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    ranks = draw(st.sampled_from([1, 2, 4]))
    sizes = draw(st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), min_size=1, max_size=6))
    return [
        layout_unit(index, f"unit {index}", [Member("p", (numel,), 0)], dtype, trainable, ranks)
        for index, (numel, trainable) in enumerate(sizes)
    ]


@given(units(), TIERS, TIERS, st.sampled_from([torch.bfloat16, torch.float32]), FORMATS, st.integers(1, 4), st.data())
def test_extents_are_aligned_and_apart(
    layouts: list[UnitLayout],
    param: str,
    optim: str,
    grad_dtype: torch.dtype,
    states: StateFormat,
    tile: int,
    data: st.DataObject,
) -> None:
    kept = GradDtypes(torch.float32, torch.float32, grad_dtype)
    policy = Policy(param, optim, optim, lambda _: kept, lambda _: states, tile * 4096)
    every = st.sampled_from([(layout.index, state) for layout in layouts for state in State])
    faster = data.draw(st.dictionaries(every, st.just(TierKind.HOST)), label="faster")
    placement = place(layouts, policy, faster)
    for layout in layouts:
        for state in State:
            if placement.holds(layout.index, state):
                assert placement.of(layout.index, state).tier == faster.get(
                    (layout.index, state), policy.tier_of(state)
                )
        index = layout.index
        assert placement.of(index, State.PARAM).nbytes == layout.shard_nbytes
        assert placement.holds(index, State.OPTIM) == layout.trainable
        assert placement.holds(index, State.GRAD) == layout.trainable
        if layout.trainable:
            cut = tiles(layout.shard_numel, placement.tile_sizes[index], states)
            assert placement.of(index, State.OPTIM).nbytes == sum(tile.nbytes for tile in cut)
            assert all(tile.offset % placement.granule == 0 for tile in cut)
            assert placement.of(index, State.GRAD).nbytes == layout.shard_numel * grad_dtype.itemsize
            width = grad_dtype.itemsize
            assert all(tile.start * width % placement.granule == 0 for tile in cut)
    for tier, nbytes in placement.nbytes.items():
        extents = sorted((e for e in placement.extents.values() if e.tier == tier), key=lambda e: e.offset)
        assert all(extent.offset % EXTENT_ALIGNMENT == 0 for extent in extents)
        assert all(first.offset + first.nbytes <= second.offset for first, second in pairwise(extents))
        assert extents[-1].offset + extents[-1].nbytes <= nbytes
        assert sum(-(-extent.nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT for extent in extents) == nbytes


@given(st.integers(1, 30), st.integers(1, 8), FORMATS)
def test_tiles_cover_a_shard(shard: int, tile: int, states: StateFormat) -> None:
    shard_numel, tile_size = shard * 2048, tile * 4096
    cut = tiles(shard_numel, tile_size, states)
    assert cut[0].start == 0 and cut[-1].stop == shard_numel
    assert all(first.stop == second.start for first, second in pairwise(cut))
    assert cut[0].offset == 0 and all(first.offset + first.nbytes == second.offset for first, second in pairwise(cut))
    for part in cut:
        assert part.offset % 4096 == 0 and part.nbytes % 4096 == 0 and part.nbytes <= cut[0].nbytes
        used = (part.stop - part.start) * states.bytes_per_element
        assert used <= part.nbytes < used + 4096


@given(st.integers(1, 20_000), FORMATS)
def test_states_lie_one_after_the_other(n: int, states: StateFormat) -> None:
    record = torch.arange(states.nbytes(n), dtype=torch.int32).to(torch.uint8)
    position = 0
    for kind, (name, place_) in zip(states.states, states.ranges(n).items(), strict=True):
        assert (kind.name, position) == (name, place_.first)
        assert place_.nbytes == -(-n // kind.per) * kind.dtype.itemsize
        position += place_.nbytes
        if n % 2048 == 0:
            assert place_.of(record).dtype == kind.dtype and place_.of(record).numel() == kind.length(n)


@given(st.integers(0, 40), st.integers(1, 3000), FORMATS)
def test_parts_of_states_hold_the_values_of_their_elements(block: int, length: int, states: StateFormat) -> None:
    start, stop = block * 256, block * 256 + length
    for kind in states.states:
        part = kind.part(start, stop)
        assert {element // kind.per for element in range(start, stop)} == set(range(part.start, part.stop))


@pytest.mark.parametrize(
    ("dtype", "master", "rule", "moments", "width"),
    [
        (torch.float32, "remainder", "adamw", "fp32", 8),
        (torch.float32, "fp32", "adam", "8bit", 2 + 1 / 128),
        (torch.bfloat16, "remainder", "adamw", "fp32", 10),
        (torch.bfloat16, "fp32", "adamw", "fp32", 12),
        (torch.bfloat16, "remainder", "adamw", "bf16", 6),
        (torch.bfloat16, "remainder", "adamw", "8bit", 4 + 1 / 128),
        (torch.bfloat16, "remainder", "lion", "8bit", 3 + 1 / 256),
        (torch.bfloat16, "remainder", "sgd", "fp32", 6),
        (torch.float16, "remainder", "adamw", "fp32", 12),
        (torch.float16, "fp32", "adagrad", "bf16", 6),
        (torch.bfloat16, "remainder", "ademamix", "fp32", 14),
        (torch.bfloat16, "remainder", "ademamix", "8bit", 5 + 3 / 256),
    ],
)
def test_bytes_per_parameter(dtype: torch.dtype, master: Any, rule: Any, moments: Any, width: float) -> None:
    """Bytes that the optimizer reads and writes per parameter, as documented."""
    assert state_format(dtype, master, rule, moments).bytes_per_element == width
