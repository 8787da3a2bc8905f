"""Every instruction set gives the bits of the plain kernel, whatever the size, the alignment and the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import _adam

SMALL = range(71)
AROUND_TILES = (4095, 4096, 4097, 65535, 65536, 65537)
ALIGNED = (0, 0, 0, 0, 0)
MISALIGNED = ((1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 0, 1, 0, 1))


def test_plain_is_always_there_and_the_fastest_is_first() -> None:
    isas = _adam.available_isas()
    assert isas == [isa for isa in ("avx512", "avx2", "plain") if isa in isas]
    assert isas[-1] == "plain"
    assert _adam.default_isa() == isas[0]


@pytest.mark.parametrize("decoupled", [True, False])
def test_small_sizes(make: Callable[..., Any], format: str, grad_dtype: str, isa: str, decoupled: bool) -> None:
    whole = make(format, grad_dtype, max(SMALL), seed=1, hostile=True)
    for n in SMALL:
        expected = whole.copy(n=n).call("plain", decoupled=decoupled)
        for offsets in (ALIGNED, *MISALIGNED):
            result = whole.copy(offsets, n).call(isa, decoupled=decoupled)
            result.assert_same(expected)
            result.assert_guards()


@pytest.mark.parametrize("hostile", [False, True])
def test_sizes_around_tiles(make: Callable[..., Any], format: str, grad_dtype: str, isa: str, hostile: bool) -> None:
    whole = make(format, grad_dtype, max(AROUND_TILES), seed=2, hostile=hostile)
    for n in AROUND_TILES:
        expected = whole.copy(n=n).call("plain")
        for offsets in (ALIGNED, MISALIGNED[0]):
            result = whole.copy(offsets, n).call(isa)
            result.assert_same(expected)
            result.assert_guards()


def test_a_million(make: Callable[..., Any], format: str, grad_dtype: str, isa: str) -> None:
    whole = make(format, grad_dtype, 1_000_003, seed=3)
    whole.copy(MISALIGNED[0]).call(isa).assert_same(whole.copy().call("plain"))


def test_an_element_does_not_depend_on_its_place(make: Callable[..., Any], format: str, grad_dtype: str) -> None:
    """The vector body and the staged tail are the same arithmetic: element by element gives the same as all at once."""
    whole = make(format, grad_dtype, 67, seed=4, hostile=True)
    expected = whole.copy().call()
    for i in range(whole.n):
        one = whole.copy()
        one.n = 1
        one.arrays = {name: None if array is None else array[i : i + 1] for name, array in one.arrays.items()}
        one.call()
        for name, array in one.arrays.items():
            assert array is None or array[0] == expected.arrays[name][i], (i, name)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 300),
    lr=st.floats(0, 10),
    beta1=st.one_of(st.sampled_from([0.0, 0.5, 0.9]), st.floats(0, 1, exclude_max=True)),
    beta2=st.one_of(st.sampled_from([0.0, 0.999]), st.floats(0, 1, exclude_max=True)),
    eps=st.one_of(st.sampled_from([0.0, 1e-45, 1e-40]), st.floats(0, 1)),
    weight_decay=st.floats(0, 1),
    step=st.integers(1, 10**12),
    decoupled=st.booleans(),
    grad_scale=st.one_of(st.just(1.0), st.floats(-1e30, 1e30)),
)
def test_any_values_and_coefficients(make: Callable[..., Any], seed: int, n: int, **hyper: Any) -> None:
    for format in ("fp32", "remainder", "master"):
        whole = make(format, "fp32", n, seed=seed, hostile=True)
        expected = whole.copy().call("plain", **hyper)
        for isa in _adam.available_isas():
            whole.copy(MISALIGNED[0]).call(isa, **hyper).assert_same(expected)


def test_bare_pass_stays_inside(make: Callable[..., Any], format: str, grad_dtype: str, isa: str) -> None:
    result = make(format, grad_dtype, 4097, seed=5).call(isa, bare=True)
    result.assert_guards()
    result.assert_same(make(format, grad_dtype, 4097, seed=5).call("plain", bare=True))
