"""Drafts on each tier: reads return the bytes of before until the draft is kept, and again if it is taken back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.plan.io import plan_durable
from infinity.plan.placement import Extent, Placement, State
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import CpuDevice
from infinity.tiers.durable import DurableTier
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import open_engine
from infinity.tiers.memory import host_tensor
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.slots import Slots

BLOCK, BLOCKS = 65536, 3
NBYTES = BLOCK * BLOCKS


def extents(kind: TierKind) -> tuple[list[Extent], list[Extent]]:
    """Return two extents and their second slots."""
    places = [Extent(kind, number * NBYTES, NBYTES, f"states {number}") for number in range(4)]
    return places[:2], places[2:]


@contextmanager
def on_disk(make: Callable[..., Tier], *arguments: object) -> Iterator[Tier]:
    folder = tempfile.mkdtemp()
    try:
        engine = open_engine(block_size=BLOCK, queue_depth=4, threads=1)
        tier = make(*arguments, open_swap_files([folder], 4 * NBYTES, name="x"), 4 * NBYTES, engine, CpuDevice())
        yield tier
        tier.close()
    finally:
        shutil.rmtree(folder)


@contextmanager
def slab() -> Iterator[tuple[Tier, list[Extent]]]:
    firsts, spares = extents(TierKind.HOST)
    tier = SlabTier(TierKind.HOST, 4 * NBYTES, CpuDevice(), spares=dict(zip(firsts, spares, strict=True)))
    yield tier, firsts


@contextmanager
def nvme() -> Iterator[tuple[Tier, list[Extent]]]:
    firsts, spares = extents(TierKind.NVME)
    second_of = dict(zip(firsts, spares, strict=True))

    def make(*arguments: object) -> NvmeTier:
        return NvmeTier(*arguments, spares=second_of)  # type: ignore[arg-type]

    with on_disk(make) as tier:
        yield tier, firsts


@contextmanager
def durable() -> Iterator[tuple[Tier, list[Extent]]]:
    firsts, _ = extents(TierKind.NVME)
    placed = Placement({(number, State.OPTIM): extent for number, extent in enumerate(firsts)}, {}, {}, {})
    slots = Slots(plan_durable("run", placed, 2 * NBYTES).extents, None)
    with on_disk(DurableTier, slots) as tier:
        for extent in firsts:
            tier.write(extent, filled(NBYTES, 0)).wait()
        commit(tier, firsts)
        yield tier, firsts


def commit(tier: Tier, firsts: list[Extent]) -> None:
    assert isinstance(tier, DurableTier)
    tier.adopt(tier.seal(), firsts)


def filled(nbytes: int, value: int) -> torch.Tensor:
    memory = host_tensor(nbytes)
    memory.fill_(value)
    return memory


def content(tier: Tier, extent: Extent) -> list[int]:
    memory = filled(NBYTES, 0xEE)
    tier.read(extent, memory).wait()
    return [int(value) for value in memory[::BLOCK]]


TIERS = {"slab": slab, "nvme": nvme, "durable": durable}
Change = tuple[int, int, bool, bool]
"""Number of the extent, first value, whether the bytes are written in windows, and whether the draft is kept."""


@pytest.mark.parametrize("kind", TIERS)
@settings(max_examples=15, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 200), st.booleans(), st.booleans()), max_size=6))
def test_a_draft_is_seen_once_it_is_kept(kind: str, changes: list[Change]) -> None:
    pool = Pool(host_tensor, {BLOCK: 2}, name="tiles")
    with TIERS[kind]() as (tier, places):
        expected = [content(tier, extent) for extent in places]
        for number, value, windows, keep in changes:
            extent = places[number]
            assert tier.begin_draft(extent)
            written = [value + block for block in range(BLOCKS)]
            for block in range(BLOCKS):
                if windows:
                    window = tier.window(extent, block * BLOCK, BLOCK, pool)
                    assert window is not None
                    window.arrived.wait()
                    present = window.tensor if window.before is None else window.before
                    assert int(present[0]) == expected[number][block]
                    window.tensor.fill_(written[block])
                    tier.store(window).wait()
                    window.release()
                else:
                    tier.write(extent, filled(BLOCK, written[block]), block * BLOCK).wait()
                assert [content(tier, each) for each in places] == expected
            tier.end_draft(extent, keep=keep)
            if keep:
                expected[number] = written
            assert [content(tier, each) for each in places] == expected
            if kind == "durable":
                commit(tier, places)
                assert [content(tier, each) for each in places] == expected
            tier.write(extent, filled(BLOCK, 255), BLOCK).wait()  # outside of a draft, a write is seen at once
            expected[number] = [expected[number][0], 255, *expected[number][2:]]
            assert [content(tier, each) for each in places] == expected
            if kind == "durable":
                commit(tier, places)


def test_windows_opened_ahead_show_no_bytes_of_before_a_kept_draft() -> None:
    pool = Pool(host_tensor, {BLOCK: 2}, name="tiles")
    with nvme() as (tier, (extent, _)):
        assert tier.begin_draft(extent)
        for block in range(BLOCKS):
            tier.write(extent, filled(BLOCK, 7), block * BLOCK).wait()
        assert tier.window_ahead(extent, 0, BLOCK, pool)
        tier.end_draft(extent, keep=True)
        window = tier.window(extent, 0, BLOCK, pool)
        assert window is not None
        window.arrived.wait()
        assert int(window.tensor[0]) == 7
        window.release()


def test_no_draft_of_a_durable_extent_with_bytes_that_are_not_committed() -> None:
    """Its other slot has the last commit, and the draft would overwrite the only copy of the present bytes."""
    with durable() as (tier, (extent, other)):
        tier.write(extent, filled(BLOCK, 1)).wait()
        assert not tier.begin_draft(extent)
        assert content(tier, extent) == [1, 0, 0]
        assert tier.begin_draft(other)


@pytest.mark.parametrize("kind", ["slab", "nvme"])
def test_no_draft_of_an_extent_with_one_slot(kind: str) -> None:
    with TIERS[kind]() as (tier, _):
        assert not tier.begin_draft(Extent(tier.kind, 2 * NBYTES, NBYTES, "gradient"))
