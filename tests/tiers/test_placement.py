"""Placement: every state of every unit has a place of its own on its tier, aligned; tiles cut it without a gap."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.tiers.placement import EXTENT_ALIGNMENT, Policy, State, place, state_format, tiles
from infinity.units.layout import UnitLayout, layout_unit

TIERS = st.sampled_from(["device", "host", "nvme"])
FORMATS = [(torch.float32, "remainder"), (torch.bfloat16, "remainder"), (torch.bfloat16, "fp32")]


@st.composite
def units(draw: st.DrawFn) -> list[UnitLayout]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    ranks = draw(st.sampled_from([1, 2, 4]))
    sizes = draw(st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), min_size=1, max_size=6))
    return [
        layout_unit(index, f"unit {index}", [("p", (numel,), 0)], dtype, trainable, ranks)
        for index, (numel, trainable) in enumerate(sizes)
    ]


@given(
    units(), TIERS, TIERS, st.booleans(), st.sampled_from([None, torch.float32]), st.sampled_from(["remainder", "fp32"])
)
def test_extents_are_aligned_and_apart(
    layouts: list[UnitLayout], param: str, optim: str, grads: bool, grad_dtype: torch.dtype | None, master: str
) -> None:
    placement = place(layouts, Policy(param, optim, optim if grads else None, grad_dtype, master))
    for layout in layouts:
        index = layout.index
        assert placement.of(index, State.PARAM).nbytes == layout.shard_nbytes
        assert placement.holds(index, State.OPTIM) == layout.trainable
        assert placement.holds(index, State.GRAD) == (layout.trainable and grads)
        if layout.trainable:
            width = state_format(layout.dtype, master).bytes_per_element
            assert placement.of(index, State.OPTIM).nbytes == layout.shard_numel * width
    for tier, nbytes in placement.nbytes.items():
        extents = sorted((e for e in placement.extents.values() if e.tier == tier), key=lambda e: e.offset)
        assert all(extent.offset % EXTENT_ALIGNMENT == 0 for extent in extents)
        assert all(first.offset + first.nbytes <= second.offset for first, second in pairwise(extents))
        assert extents[-1].offset + extents[-1].nbytes <= nbytes
        assert sum(-(-extent.nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT for extent in extents) == nbytes


@given(st.integers(1, 30), st.integers(1, 8), st.sampled_from(FORMATS))
def test_tiles_cover_a_shard(shard: int, tile: int, kind: tuple[torch.dtype, str]) -> None:
    states = state_format(*kind)
    shard_numel, tile_size = shard * 2048, tile * 4096
    cut = tiles(shard_numel, tile_size, states)
    assert cut[0].start == 0 and cut[-1].stop == shard_numel
    assert all(first.stop == second.start for first, second in pairwise(cut))
    assert all(first.offset + first.nbytes == second.offset for first, second in pairwise(cut))
    assert sum(tile.nbytes for tile in cut) == shard_numel * states.bytes_per_element
    for part in cut:
        assert part.offset % 4096 == 0 and part.nbytes <= cut[0].nbytes
        position = 0
        for (name, dtype), (found, (first, length, found_dtype)) in zip(
            states.states, part.state_ranges(states).items(), strict=True
        ):
            assert (name, dtype, position) == (found, found_dtype, first)
            assert length == (part.stop - part.start) * dtype.itemsize
            assert first % dtype.itemsize == 0
            position += length
        assert position == part.nbytes


@pytest.mark.parametrize(
    ("dtype", "master", "kind", "width"),
    [
        (torch.float32, "remainder", "fp32", 8),
        (torch.float32, "fp32", "fp32", 8),
        (torch.bfloat16, "remainder", "remainder", 10),
        (torch.bfloat16, "fp32", "master", 12),
    ],
)
def test_formats(dtype: torch.dtype, master: str, kind: str, width: int) -> None:
    """What the optimizer reads and writes per parameter: 10 bytes in bf16, the fewest that lose nothing."""
    found = state_format(dtype, master)
    assert (found.kind, found.bytes_per_element) == (kind, width)
