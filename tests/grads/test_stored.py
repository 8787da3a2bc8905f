"""A stored gradient is read in pieces: each value once its bytes have arrived, with a few buffers for any shard."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from infinity.grads.buffers import StoredPieces, cut
from infinity.plan.layout import Part
from infinity.plan.placement import EXTENT_ALIGNMENT, Extent
from infinity.plan.pools import PIECE_BYTES
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import host_tensor
from infinity.tiers.passing import PassingTier
from infinity.tiers.pool import Pool
from infinity.tiers.transfer import Transfer
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import LateSlab
from support.loops import assert_same, trained
from support.models import seeded

MOST = 32 << 10
"""Elements of a piece."""


def parts_of(lengths: list[int]) -> list[Part]:
    """Return parts of these lengths, each from a multiple of 256 elements."""
    parts, start = [], 0
    for length in lengths:
        parts.append(Part(start, start + length))
        start += -(-length // 256) * 256
    return parts


@pytest.mark.parametrize("buffers", [1, 3])
@given(st.lists(st.integers(1, 3 * MOST), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=20)
def test_every_piece_is_what_is_stored(buffers: int, lengths: list[int], dtype: torch.dtype) -> None:
    parts = parts_of(lengths)
    numel = -(-parts[-1].stop // 2048) * 2048
    stored = torch.randn(numel).to(dtype)
    extent = Extent(TierKind.NVME, EXTENT_ALIGNMENT, numel * dtype.itemsize, "gradient")
    disk = LateSlab(EXTENT_ALIGNMENT + extent.nbytes)
    disk.slab[EXTENT_ALIGNMENT:] = stored.view(torch.uint8)
    pool = Pool(
        host_tensor, {MOST * dtype.itemsize + 2 * EXTENT_ALIGNMENT: buffers}, name="x", poison=CpuDevice().poison
    )
    pieces = cut(parts, numel, MOST)
    found = StoredPieces(disk, extent, dtype, pieces, pool)
    read = [found[start:stop].clone() for start, stop in found.along(iter(pieces))]
    assert torch.equal(torch.cat(read), stored)
    assert not pool.leased


def test_memory_needs_no_buffer() -> None:
    tier = PassingTier(TierKind.HOST, CpuDevice())
    stored = torch.randn(3 * MOST)
    extent = Extent(TierKind.HOST, 0, stored.nbytes, "gradient")
    tier.write(extent, stored.view(torch.uint8))
    pieces = cut([Part(0, 3 * MOST)], 3 * MOST, MOST)
    found = StoredPieces(tier, extent, torch.float32, pieces, Pool(host_tensor, {}, name="x"))
    assert torch.equal(torch.cat([found[start:stop] for start, stop in found.along(pieces)]), stored)


class Noting(LateSlab):
    """A late disk that keeps the reads."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.reads: list[Transfer] = []

    def read(self, extent: Extent, destination: torch.Tensor, offset: int = 0) -> Transfer:
        self.reads.append(super().read(extent, destination, offset))
        return self.reads[-1]


def test_an_error_returns_all_buffers_after_their_reads() -> None:
    numel = 5 * MOST
    extent = Extent(TierKind.NVME, 0, numel * 4, "gradient")
    pool = Pool(host_tensor, {MOST * 4 + 2 * EXTENT_ALIGNMENT: 3}, name="x", poison=CpuDevice().poison)
    pieces = cut([Part(0, numel)], numel, MOST)
    disk = Noting(extent.nbytes)
    found = StoredPieces(disk, extent, torch.float32, pieces, pool)
    with pytest.raises(ZeroDivisionError), contextlib.closing(found.along(pieces)) as arrived:
        for _ in arrived:
            assert pool.leased == 3
            raise ZeroDivisionError
    assert not pool.leased and len(disk.reads) == 3 and all(read.done() for read in disk.reads)


class Wide(torch.nn.Module):
    """One matrix of several pieces, which are not multiples of a block, and a bias that starts within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2 * PIECE_BYTES // 4 // 300, 701)
        self.head = torch.nn.Linear(701, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(torch.tanh(self.table(tokens))).square().mean()
        return loss


BATCHES = [(torch.randint(0, 6000, (4, 7), generator=torch.Generator().manual_seed(seed)),) for seed in range(6)]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
def test_sums_on_nvme_are_those_in_memory(late: bool, tmp_path: Path) -> None:
    """The norm too, which clips: its sums have the same bits in pieces."""
    results = []
    for place in ("nvme", "cpu"):
        config = engine_config(
            place, place, folder=tmp_path, accumulation=3, clip=0.01, unit_size="64MB", aio={"checksum": True}
        )
        results.append(trained(seeded(Wide), BATCHES, config, LateDevice() if late else None))
    assert_same(*results)
