"""Ranks that begin with the same batch, as without a distributed sampler, are warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.engine.same_batches import alike, digest_of
from multirank.batch_cases import warned
from support.ranks import Group


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (3, 2), (0, 2), (2, 1)])
def test_the_same_batch_on_two_ranks(pair: Group, stage: int, accumulation: int, tmp_path: Path) -> None:
    """Rank 0 logs one warning, in the first step."""
    first, second = pair.run(warned, batches="same", folder=str(tmp_path), stage=stage, accumulation=accumulation)
    assert len(first) == 1 and second == []
    assert "ranks 0 and 1 began training with bit-identical batches" in first[0]
    assert "DistributedSampler" in first[0]


@pytest.mark.parametrize("batches", ["distinct", "zeros", "later same"])
def test_no_warning(pair: Group, batches: str, tmp_path: Path) -> None:
    assert pair.run(warned, batches=batches, folder=str(tmp_path), stage=3) == [[], []]


def test_one_rank_is_not_warned(tmp_path: Path) -> None:
    assert warned(0, batches="same", folder=str(tmp_path), stage=3) == []


def test_the_first_ranks_that_share_a_batch_are_named() -> None:
    assert alike([b"a", b"b", b"c"]) == []
    assert alike([None, None]) == []
    assert alike([b"a", b"b", b"c", b"b"]) == [1, 3]


def test_digests_tell_arguments_apart() -> None:
    """Digests follow values, shapes and dtypes of tensors at any depth; single values have none."""
    x = torch.randn(3, 4)
    different = [
        ((x,), {}),
        ((), {"x": {"inside": [x + 1]}}),
        ((x.t(),), {}),
        ((x.bfloat16(),), {}),
        ((x.to(torch.complex64).conj(),), {}),
        ((torch.arange(12),), {}),
        ((x > 0,), {}),
    ]
    digests = [digest_of(each) for each in different]
    assert None not in digests and len(set(digests)) == len(digests)
    assert digest_of(((), {"x": x})) == digest_of(((x.clone(),), {}))
    for empty in ((), (torch.zeros(3),), (torch.empty(0),), (3, "text"), (torch.full((2, 2), float("nan")).fill_(2),)):
        assert digest_of((empty, {})) is None
