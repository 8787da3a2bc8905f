"""The sum of squares is correct, and bit-identical for every ISA, number of threads, alignment and split."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infinity.native import _adam
from infinity.optim.cpu_adam import sum_of_squares

TILE, LANES = 4096, 32
SIZES = [*range(0, 71), 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_000_003]
Array = npt.NDArray[Any]


def values(n: int, dtype: str, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-20, 3, n)).astype(np.float32)
    if dtype == "fp16":
        return x.astype(np.float16)
    return x if dtype == "fp32" else (x.view(np.uint32) >> 16).astype(np.uint16)


def as_doubles(x: Array) -> npt.NDArray[np.float64]:
    return np.asarray((x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x, np.float64)


def native(x: Array, dtype: Any, **options: Any) -> float:
    return _adam.sum_of_squares(x.ctypes.data, x.size, dtype, **options)


def defined(x: Array, scale: float = 1.0, initial: float = 0.0) -> float:
    """Return the sum as defined in infinity/native/_adam.pyi, in numpy."""
    padded = np.zeros(-(-x.size // TILE) * TILE)
    padded[: x.size] = as_doubles(x)
    total = initial
    for tile in padded.reshape(-1, TILE // LANES, LANES):
        lanes = np.zeros(LANES)
        for row in tile:
            lanes += row * row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0]) * scale * scale
    return total


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_bits_are_those_of_the_definition(dtype: str, isa: str) -> None:
    for n in [s for s in SIZES if s <= 4097] + [65_537]:
        x = values(n, dtype, n)
        assert native(x, dtype, isa=isa) == defined(x), n
        assert native(x, dtype, isa=isa, scale=0.3, initial=7.0) == defined(x, 0.3, 7.0), n


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_threads_and_alignment(dtype: str, isa: str) -> None:
    for n in SIZES:
        x = values(n, dtype, n)
        shifted = np.empty(n + 1, x.dtype)[1:]
        shifted[:] = x
        expected = native(x, dtype, isa="plain", threads=1)
        for threads in (1, 2, 3, 7):
            assert native(x, dtype, isa=isa, threads=threads) == expected
            assert native(shifted, dtype, isa=isa, threads=threads) == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_cut_at_multiples_of_a_tile(dtype: str) -> None:
    x = values(200_003, dtype)
    expected = native(x, dtype, scale=0.7)
    for cuts in ([0, TILE, 200_003], [0, 65_536, 131_072, 200_003], [*range(0, 200_003, TILE), 200_003]):
        total = 0.0
        for begin, end in itertools.pairwise(cuts):
            total = native(x[begin:end], dtype, scale=0.7, initial=total)
        assert total == expected


def test_close_to_the_exact_sum() -> None:
    x = values(300_000, "fp32")
    assert native(x, "fp32") == pytest.approx(math.fsum(np.square(as_doubles(x))), rel=1e-14)


def test_extremes_neither_overflow_nor_vanish(isa: str) -> None:
    largest, smallest = np.float32(3.4028235e38), np.float32(1.4e-45)
    assert native(np.full(100, largest), "fp32", isa=isa) == pytest.approx(100 * float(largest) ** 2, rel=1e-14)
    assert native(np.full(100, smallest), "fp32", isa=isa) == pytest.approx(100 * float(smallest) ** 2, rel=1e-14)
    assert native(np.full(100, largest), "fp32", isa=isa, scale=1e-30) == pytest.approx(1e-58 * float(largest) ** 2)


@pytest.mark.parametrize("at", [0, 15, 31, 32, 4095, 4096, 69_999, 70_000])
def test_inf_and_nan_propagate(at: int, isa: str) -> None:
    x = np.ones(70_001, np.float32)
    x[at] = -np.inf
    assert native(x, "fp32", isa=isa) == np.inf
    x[at] = np.nan
    assert math.isnan(native(x, "fp32", isa=isa))
    x[at], x[0 if at else 1] = np.nan, np.inf
    assert math.isnan(native(x, "fp32", isa=isa))


def test_wrapper() -> None:
    x = torch.from_numpy(values(10_000, "fp32")).reshape(100, 100)
    assert sum_of_squares(x) == native(x.numpy().ravel(), "fp32")
    assert sum_of_squares(x.bfloat16(), 0.5, 1.0) == pytest.approx(
        1 + 0.25 * float(x.bfloat16().double().square().sum())
    )
    assert sum_of_squares(torch.empty(0)) == 0.0
    halves = (x.clamp(-1, 1)).half()
    assert sum_of_squares(halves) == pytest.approx(float(halves.double().square().sum()))
    with pytest.raises(ValueError, match=r"float64.*pass torch\.float32 or torch\.bfloat16 or torch\.float16"):
        sum_of_squares(x.double())
