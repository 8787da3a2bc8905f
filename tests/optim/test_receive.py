"""`receive` copies or adds gradients as torch does, and returns the bit-identical sum of squares in the same pass."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from infinity.native import _adam
from infinity.optim.cpu_adam import DTYPES, receive, sum_of_squares
from infinity.update.kernels import receive as receive_anywhere

SIZES = [*range(0, 36), 63, 64, 65, 4095, 4096, 4097, 8191, 8193, 65_535, 65_537, 200_003]
PAIRS = [*itertools.product(DTYPES, DTYPES)]


def values(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of many magnitudes, with ties: sums of bf16 values often lie halfway between two."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=rng) * 2.0 ** torch.randint(-12, 8, (n,), generator=rng)
    x[::7] = x[::7].to(torch.bfloat16).float()
    return x.to(dtype)


def by_torch(target: torch.Tensor, source: torch.Tensor, add: bool) -> torch.Tensor:
    return (target.float() + source.float()).to(target.dtype) if add else source.float().to(target.dtype)


def call(target: torch.Tensor, source: torch.Tensor, **options: Any) -> float:
    names = {"source_dtype": DTYPES[source.dtype], "target_dtype": DTYPES[target.dtype]}
    return _adam.receive(source.data_ptr(), target.data_ptr(), target.numel(), **names, **options)


@pytest.mark.parametrize("add", [False, True], ids=["copied", "added"])
@pytest.mark.parametrize(("into", "of"), PAIRS, ids=lambda dtype: DTYPES[dtype])
def test_values_and_sums(into: torch.dtype, of: torch.dtype, add: bool, isa: str) -> None:
    for n in SIZES:
        target, source = values(n, into, 1), values(n, of, 2)
        expected = by_torch(target, source, add)
        squares = call(target, source, add=add, isa=isa)
        assert torch.equal(target, expected), n
        assert squares == sum_of_squares(expected), n


@pytest.mark.parametrize("add", [False, True], ids=["copied", "added"])
@pytest.mark.parametrize("into", DTYPES, ids=DTYPES.get)
def test_what_is_not_finite(into: torch.dtype, add: bool, isa: str) -> None:
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 65520.0, 65519.0, 6e-8]
    source = torch.tensor(special * 5)
    target = torch.ones(source.numel()).to(into) if add else torch.zeros(source.numel()).to(into)
    expected = by_torch(target, source, add)
    assert math.isnan(call(target, source, add=add, isa=isa))
    assert torch.equal(target.isnan(), expected.isnan())
    assert torch.equal(target.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    infinite = torch.tensor([1.0, math.inf, 2.0])
    assert receive(torch.zeros(3).to(into), infinite) == math.inf


def test_the_bits_do_not_depend_on_threads_or_alignment() -> None:
    source, target = values(300_001, torch.bfloat16, 3), values(300_001, torch.float32, 4)
    expected = target.clone()
    squares = call(expected, source, add=True, threads=1, isa="plain")
    for threads, shift in itertools.product((1, 2, 3), (0, 1, 5)):
        moved, into = torch.empty(300_010, dtype=source.dtype)[shift:], torch.empty(300_010)[shift:]
        moved, into = moved[: source.numel()], into[: target.numel()]
        moved.copy_(source)
        into.copy_(target)
        assert call(into, moved, add=True, threads=threads) == squares
        assert torch.equal(into, expected)


def test_any_strides() -> None:
    """Non-contiguous gradients take the slow path, with the same result."""
    source = values(64 * 48, torch.float32, 5).view(64, 48)
    for add in (False, True):
        target, expected = torch.ones(48, 64), torch.ones(48, 64)
        squares = receive_anywhere(target, source.t(), add=add)
        assert squares == receive(expected, source.t().contiguous(), add=add)
        assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("target", "source", "says"),
    [
        (torch.zeros(4), torch.zeros(5), "source has 5 elements where 4 are needed"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), "source is torch.int32"),
        (torch.zeros(4, 2).t(), torch.zeros(2, 4), "target of shape"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "source is on meta"),
    ],
)
def test_what_cannot_be_received(target: torch.Tensor, source: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        receive(target, source)


def test_an_array_is_not_added_to_itself() -> None:
    x = torch.ones(100)
    with pytest.raises(ValueError, match="share"):
        receive(x[:50], x[25:75], add=True)


@pytest.mark.parametrize("add", [False, True], ids=["copied", "added"])
@pytest.mark.parametrize("transposed", [False, True], ids=["dense", "transposed"])
def test_a_part_of_the_target(add: bool, transposed: bool) -> None:
    """`at` places a source in a part of a flat target, as gradients in a unit."""
    target, source = values(5000, torch.float32, 1), values(60, torch.float32, 2).view(6, 10)
    source = source.t() if transposed else source
    expected = target.clone()
    expected[768:828] = by_torch(target[768:828], source.reshape(-1), add)
    squares = receive_anywhere(target, source, add=add, at=768)
    assert torch.equal(target, expected) and squares == sum_of_squares(expected[768:828])


@pytest.mark.parametrize("at", [-1, 3, 4])
def test_a_part_beyond_the_target(at: int) -> None:
    with pytest.raises(ValueError, match="do not fit into 4"):
        receive(torch.zeros(4), torch.zeros(2), at=at)
