"""Exchanges between every pair of ranks: exact, in the order of ranks, within a buffer of fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.comm.pairs import PairwiseCollectives
from infinity.plan.pools import EXCHANGE_BYTES
from multirank import cases, pair_cases
from multirank.test_ranks import assert_bits
from support.ranks import Group


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.stop()


@pytest.fixture(params=[1, 2, 3])
def group(request: pytest.FixtureRequest) -> Group:
    """One rank, two, and an odd number, of which parts differ in length."""
    found: Group = request.getfixturevalue({1: "single", 2: "pair", 3: "three"}[request.param])
    return found


@pytest.mark.parametrize("length", [2, 3, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("longest", [None, 256], ids=["one piece", "many pieces"])
def test_sums_are_exact(group: Group, length: int, dtype: torch.dtype, longest: int | None) -> None:
    """A rank's own part is the sum, and nothing else has changed; after an all-reduce all parts are."""
    size = group.size
    total = sum(pair_cases.values(rank, length, dtype) for rank in range(size))
    common: dict[str, Any] = {"size": size, "length": length, "dtype": dtype, "longest": longest}
    for rank, flat in enumerate(group.run(pair_cases.summed, everywhere=False, **common)):
        expected = pair_cases.values(rank, length, dtype)
        own = slice(rank * length // size, (rank + 1) * length // size)
        expected[own] = total[own]
        assert torch.equal(flat, expected)
    for flat in group.run(pair_cases.summed, everywhere=True, **common):
        assert torch.equal(flat, total)


def test_sums_are_in_the_order_of_ranks(three: Group) -> None:
    """Bit for bit (a + b) + c, on whichever rank the element is summed; another order gives other numbers here."""
    given = [[1e8] * 6, [1.0, -1e8, 3.0, 1.0, -1e8, 3.0], [-1e8, 5.0, -1e8, -1e8, 5.0, -1e8]]
    a, b, c = (torch.tensor(row) for row in given)
    expected = (a + b) + c
    assert not torch.equal(expected, a + (b + c)) and not torch.equal(expected, (a + c) + b)
    for flat in three.run(pair_cases.in_order, size=3, given=given):
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("length", [2, 3, 1000])
def test_gathers_every_part(group: Group, length: int) -> None:
    for flat in group.run(pair_cases.gathered, size=group.size, length=length):
        assert torch.equal(flat, torch.arange(length, dtype=torch.float32))


def test_tells_what_every_rank_says(group: Group) -> None:
    expected = [[[rank, 2**62 + turn, -turn] for rank in range(group.size)] for turn in range(3)]
    for said in group.run(pair_cases.reported, size=group.size):
        assert said == expected


def test_each_rank_sends_what_theory_asks_for(group: Group) -> None:
    """(n - 1) / n of the tensor once, or twice for an all-reduce."""
    length = 6 * 1000
    part = 4 * length * (group.size - 1) // group.size
    for found in group.run(pair_cases.sent, size=group.size, length=length):
        assert found == {"all_gather": part, "reduce_scatter": part, "all_reduce": 2 * part}


def test_the_buffer_is_in_the_ledger(pair: Group, tmp_path: Path) -> None:
    for held, kept in pair.run(pair_cases.accounted, folder=str(tmp_path)):
        assert held == kept > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("longest", [0, 100, 10 << 20, 1 << 30])
def test_the_buffer_is_no_larger_than_needed_and_than_allowed(size: int, longest: int) -> None:
    nbytes = PairwiseCollectives(None, 0, size, sums=longest).nbytes  # type: ignore[arg-type]
    assert nbytes <= EXCHANGE_BYTES
    assert nbytes % (2 * max(1, size - 1) * 8) == 0, "pieces of whole elements"
    assert nbytes <= 2 * (size - 1) * (longest + 63)
    if size > 1 and longest:
        assert nbytes >= min(2 * (size - 1) * longest, EXCHANGE_BYTES // 2)


def test_stages_give_the_same_bits_on_three_ranks(three: Group, tmp_path: Path) -> None:
    """All-reduce and reduce-scatter sum in the same order, however the parts are cut."""
    common: dict[str, Any] = {"ranks": 3, "steps": 2, "folder": str(tmp_path), "param": "none", "optim": "none"}
    expected = three.run(cases.training, stage=3, **common)
    for stage in (0, 1, 2):
        for one, other in zip(expected, three.run(cases.training, stage=stage, **common), strict=True):
            assert one["losses"] == other["losses"]
            assert_bits(one, other)
