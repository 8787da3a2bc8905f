"""A shard's pieces cover it, are small, and give the sum of squares the bits of one pass."""

from __future__ import annotations

import pytest
import torch

from infinity.grads.buffers import cut
from infinity.optim.cpu_adam import receive, sum_of_squares
from infinity.plan.layout import Part
from infinity.update.kernels import SUM_TILE

SHARDS = [
    ([], 2048),
    ([Part(0, 5000)], 6144),
    ([Part(0, 100), Part(256, 20_000), Part(20_224, 20_225), Part(20_480, 90_000)], 92_160),
    ([Part(k * 256, k * 256 + 200) for k in range(120)], 30_720),
    ([Part(300, 4396), Part(4608, 60_000)], 65_536),
]


@pytest.mark.parametrize("most", [4096, 5000, 12_288, 1 << 20])
@pytest.mark.parametrize("parts, numel", SHARDS)
def test_pieces_cut_parts_at_tiles_of_the_sum(parts: list[Part], numel: int, most: int) -> None:
    pieces = cut(parts, numel, most)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])] and pieces[-1][1] == numel
    assert all(0 < stop - start <= most for start, stop in pieces)
    for start, _ in pieces:
        assert all((start - part.start) % SUM_TILE == 0 for part in parts if part.start < start < part.stop)


def test_a_small_shard_is_one_piece() -> None:
    assert cut([Part(0, 100), Part(256, 300)], 2048, 4096) == ((0, 2048),)


@pytest.mark.parametrize("add", [False, True], ids=["copied", "added"])
def test_a_sum_continued_from_piece_to_piece_has_the_bits_of_one_pass(add: bool) -> None:
    source, target = torch.randn(50_001).bfloat16(), torch.randn(50_001)
    expected = target.clone()
    whole = receive(expected, source, add=add)
    total = 0.0
    for start, stop in cut([Part(0, 50_001)], 50_001, 9000):
        total = receive(target[start:stop], source[start:stop], add=add, initial=total)
    assert torch.equal(target, expected)
    assert total == whole == sum_of_squares(expected)


def test_tiles_are_those_of_the_kernels() -> None:
    assert SUM_TILE == pytest.importorskip("infinity.native._adam_cuda").SUM_TILE
