"""A warning names ranks that begin with the same batches, as without a distributed sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.engine.loss_check import Digest, alike
from multirank.batch_cases import parts_of_a_model, warned
from support.ranks import Group


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (3, 2), (0, 2), (2, 1)])
@pytest.mark.parametrize("whole_steps", [False, True])
def test_the_same_batches_on_two_ranks(
    pair: Group, stage: int, accumulation: int, whole_steps: bool, tmp_path: Path
) -> None:
    """Rank 0 logs one warning, in the first step, after calls of `step` and in `train_batch`."""
    first, second = pair.run(
        warned,
        batches="same",
        folder=str(tmp_path),
        stage=stage,
        accumulation=accumulation,
        whole_steps=whole_steps,
    )
    assert len(first) == 1 and second == []
    assert "ranks 0 and 1 began training with bit-identical batches" in first[0]
    assert "DistributedSampler" in first[0]


@pytest.mark.parametrize("batches", ["distinct", "0", "1"])
def test_batches_that_differ_in_the_first_step(pair: Group, batches: str, tmp_path: Path) -> None:
    """One micro-batch of the first step that differs suffices."""
    assert pair.run(warned, batches=batches, folder=str(tmp_path), stage=3, accumulation=2) == [[], []]


def test_only_the_first_step_is_compared(pair: Group, tmp_path: Path) -> None:
    assert pair.run(warned, batches="1", folder=str(tmp_path), stage=3)[0] != []
    assert pair.run(warned, batches="0", folder=str(tmp_path), stage=3) == [[], []]


def test_batches_of_zeros(pair: Group, tmp_path: Path) -> None:
    """Batches and masks that hold one value each may be equal on all ranks."""
    assert pair.run(warned, batches="zeros", folder=str(tmp_path), stage=3, whole_steps=True) == [[], []]


def test_ranks_that_hold_parts_of_a_model(pair: Group, tmp_path: Path) -> None:
    """Ranks outside of the data-parallel group share their batches."""
    assert pair.run(parts_of_a_model, folder=str(tmp_path)) == [[], []]


def test_one_rank_is_not_warned(tmp_path: Path) -> None:
    assert warned(0, batches="same", folder=str(tmp_path), stage=3) == []


def test_the_first_ranks_that_share_a_batch_are_named() -> None:
    assert alike([b"a", b"b", b"c"]) == []
    assert alike([None, None]) == []
    assert alike([b"a", b"b", b"c", b"b"]) == [1, 3]


def _digest(*arguments: object) -> bytes | None:
    digest = Digest()
    digest.add(arguments)
    return digest.value()


def test_digests_distinguish_arguments() -> None:
    """Digests follow values, shapes and dtypes of tensors at any depth."""
    x = torch.randn(3, 4)
    different = [
        (x,),
        ({"x": {"inside": [x + 1]}},),
        (x.t(),),
        (x.bfloat16(),),
        (x.to(torch.complex64),),
        (torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj(),),
        (torch.arange(12),),
        (x > 0,),
        (x, x),
        (x[:1].expand(9, 4),),
        (torch.zeros(1, 1 << 23).index_fill(1, torch.tensor([(1 << 23) - 1]), 1),),
        (torch.zeros(1, 1 << 23).index_fill(1, torch.tensor([(1 << 23) - 2]), 1),),
    ]
    digests = [_digest(*each) for each in different]
    assert None not in digests and len(set(digests)) == len(digests)
    assert _digest({"x": x}) == _digest(x.clone()) == _digest(x.t().contiguous().t())
    assert _digest(x.requires_grad_()) == _digest(x.detach())


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(None, id="none"),
        pytest.param("text", id="text"),
        pytest.param(torch.zeros(3), id="zeros"),
        pytest.param(torch.empty(0), id="empty"),
        pytest.param(torch.tensor(2.0), id="scalar"),
        pytest.param(torch.full((2, 2), float("nan")), id="nan"),
        pytest.param(torch.randn(3, device="meta"), id="meta"),
        pytest.param(torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(torch.ones(1, 1).expand(1 << 20, 1 << 20), id="expanded"),
    ],
)
def test_arguments_without_a_digest(empty: object) -> None:
    """Tensors of one value and those without memory of their own have no digest."""
    assert _digest(empty) is None


def test_large_tensors_are_read_in_parts() -> None:
    """A tensor of 2^26 elements is sampled over its whole length."""
    x = torch.zeros(1 << 26, dtype=torch.int8)
    plain = _digest(torch.arange(2), x)
    x[-(1 << 20) - 1 :] = 1
    assert _digest(torch.arange(2), x) != plain
