"""Flat arrays with the full variety of values, and one call of the native kernel on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from infinity import _adam

Array = npt.NDArray[Any]

HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
    "decoupled": True,
}
GUARD = 0xA5  # the byte around every array
NAMED = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000),  # zeros, subnormals, the smallest normal
        *(0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000),  # largest finite values, infinities
        *(0x7FC00000, 0x7FC12345, 0x7F800001, 0xFFFFFFFF),  # NaNs, quiet and signalling
        *(0x3F808000, 0x3F807FFF, 0xBF808000, 0x00008000, 0x80008000),  # ties and next to one
    ],
    np.uint32,
)


def random_bits(rng: np.random.Generator, n: int, *, hostile: bool) -> Array:
    """fp32 patterns as uint32, (n,): values as in training; if hostile, half of them from the whole range of
    patterns and from NAMED."""
    values = rng.standard_normal(n).astype(np.float32).view(np.uint32)
    if hostile:
        some = rng.integers(0, 4, n)
        values[some == 1] = rng.integers(0, 1 << 32, int((some == 1).sum()), dtype=np.uint32)
        values[some == 2] = rng.choice(NAMED, int((some == 2).sum()))
    return values


def guarded(values: Array, offset: int) -> Array:
    """A copy that starts `offset` elements after a 64-byte boundary, between bytes that must not change."""
    size = values.itemsize
    raw = np.full(values.nbytes + 3 * 64 + offset * size, GUARD, np.uint8)
    start = -raw.ctypes.data % 64 + 64 + offset * size
    view = raw[start : start + values.nbytes].view(values.dtype)
    view[:] = values
    return view


@dataclass
class Problem:
    """param, master (or None), grad, exp_avg, exp_avg_sq: bit patterns as uint16, int16 or uint32, shape (n,)."""

    format: Any
    grad_dtype: Any
    n: int
    arrays: dict[str, Array | None] = field(default_factory=dict)

    def call(self, isa: str = "auto", threads: int = 0, *, bare: bool = False, **hyper: Any) -> Problem:
        given: dict[str, Any] = {name: 0 if x is None else x.ctypes.data for name, x in self.arrays.items()}
        given |= {"n": self.n, "format": self.format, "grad_dtype": self.grad_dtype, "isa": isa, "threads": threads}
        if bare:
            _adam.bare(**given)
        else:
            _adam.adam(**given, **(HYPER | hyper))
        return self

    def copy(self, offsets: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0), n: int | None = None) -> Problem:
        """The first n elements, each array `offsets` elements past a 64-byte boundary."""
        n = self.n if n is None else n
        arrays = {
            name: None if array is None else guarded(array[:n], offset)
            for (name, array), offset in zip(self.arrays.items(), offsets, strict=True)
        }
        return Problem(self.format, self.grad_dtype, n, arrays)

    def assert_same(self, other: Problem) -> None:
        for name, array in self.arrays.items():
            expected = other.arrays[name]
            if array is not None and expected is not None and not np.array_equal(array, expected):
                at = np.flatnonzero(array != expected)
                pytest.fail(f"{name}: {at.size} of {self.n} differ, first [{at[0]}] {array[at[0]]:#x}")

    def assert_guards(self) -> None:
        for name, array in self.arrays.items():
            if array is None:
                continue
            raw = array
            while isinstance(raw.base, np.ndarray):
                raw = raw.base
            start = array.ctypes.data - raw.ctypes.data
            outside = np.concatenate([raw[:start], raw[start + array.nbytes :]])
            assert (outside == GUARD).all(), f"{name}: written outside"


def make_problem(format: str, grad_dtype: str, n: int, *, seed: int = 0, hostile: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    master = random_bits(rng, n, hostile=hostile)
    grad = random_bits(rng, n, hostile=hostile)
    exp_avg = random_bits(rng, n, hostile=hostile)
    exp_avg_sq = random_bits(rng, n, hostile=hostile)
    exp_avg_sq[rng.integers(0, 8, n) > 0] &= 0x7FFFFFFF  # a few stay negative: the root of those is NaN
    param: Array = master
    kept: Array | None = None
    if format == "remainder":  # any two halves, not only those that split() writes
        param, kept = (master >> 16).astype(np.uint16), master.astype(np.uint16).view(np.int16)
    elif format == "master":
        param, kept = np.zeros(n, np.uint16), master
    grad_values: Array = grad if grad_dtype == "fp32" else (grad >> 16).astype(np.uint16)
    arrays = {"param": param, "master": kept, "grad": grad_values, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return Problem(format, grad_dtype, n, arrays).copy()


@pytest.fixture(scope="session")
def make() -> Callable[..., Problem]:
    """make(format, grad_dtype, n, seed=0, hostile=False) -> Problem"""
    return make_problem


@pytest.fixture(params=["fp32", "remainder", "master"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["fp32", "bf16"])
def grad_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["avx512", "avx2", "plain"])
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in _adam.available_isas():
        pytest.skip(f"this machine or build lacks {request.param}")
    return str(request.param)
