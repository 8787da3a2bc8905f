"""Every instruction set is bit-identical to the plain kernel, for any size, alignment and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from infinity.native import _adam
from infinity.plan.formats import BLOCK
from infinity.rules import RULES

GRADS = ("fp32", "bf16", "fp16")
SMALL = range(71)
AROUND_BLOCKS = (255, 256, 257, 258, 511, 512, 513, 1023, 1024, 1025)
FEW = (1, 7, 8, 9, 15, 16, 17, 33, 255, 256, 257, 271, 272, 513)
AROUND_TILES = (4095, 4096, 4097, 65535, 65536, 65537)
ALIGNED = (0,) * 9
MISALIGNED = ((1,) * 9, (1, 0, 0, 0, 0, 0, 1, 0, 0), (0, 1, 0, 3, 5, 0, 0, 1, 1), (0, 0, 1, 7, 1, 2, 0, 0, 0))


def test_plain_is_always_there_and_the_fastest_is_first() -> None:
    isas = _adam.available_isas()
    assert isas == [isa for isa in ("avx512", "avx2", "plain") if isa in isas]
    assert isas[-1] == "plain"
    assert _adam.default_isa() == isas[0]


def test_every_combination(make: Callable[..., Any], format: str, moments: str, isa: str) -> None:
    for rule in RULES:
        for grad_dtype in GRADS:
            for hostile in (False, True):
                whole = make(format, grad_dtype, max(FEW), rule=rule, moments=moments, seed=7, hostile=hostile)
                for turn, n in enumerate(FEW):
                    nesterov = {"nesterov": bool(turn % 2)}
                    expected = whole.copy(n=n).call("plain", **nesterov)
                    result = whole.copy(MISALIGNED[turn % len(MISALIGNED)], n).call(isa, **nesterov)
                    result.assert_same(expected, (rule, grad_dtype, hostile, n))
                    result.assert_guards()


@pytest.mark.parametrize("rule", ["adamw", "lion", "ademamix"])
def test_small_sizes_and_blocks(make: Callable[..., Any], format: str, moments: str, rule: str, isa: str) -> None:
    whole = make(format, "bf16", max(AROUND_BLOCKS), rule=rule, moments=moments, seed=1, hostile=True)
    for n in (*SMALL, *AROUND_BLOCKS):
        expected = whole.copy(n=n).call("plain")
        for offsets in (ALIGNED, MISALIGNED[n % len(MISALIGNED)]):
            result = whole.copy(offsets, n).call(isa)
            result.assert_same(expected, n)
            result.assert_guards()


@pytest.mark.parametrize("hostile", [False, True])
def test_sizes_around_tiles(make: Callable[..., Any], format: str, moments: str, isa: str, hostile: bool) -> None:
    whole = make(format, "fp32", max(AROUND_TILES), moments=moments, seed=2, hostile=hostile)
    for n in AROUND_TILES:
        expected = whole.copy(n=n).call("plain")
        result = whole.copy(MISALIGNED[0], n).call(isa)
        result.assert_same(expected, n)
        result.assert_guards()


def test_a_million(make: Callable[..., Any], format: str, moments: str, isa: str) -> None:
    whole = make(format, "bf16", 1_000_003, moments=moments, seed=3)
    whole.copy(MISALIGNED[0]).call(isa).assert_same(whole.copy().call("plain"))


@pytest.mark.parametrize("moments", ["fp32"])
def test_an_element_does_not_depend_on_its_place(
    make: Callable[..., Any], format: str, grad_dtype: str, rule: str, moments: str
) -> None:
    """The vector body and the staged tail use the same arithmetic, so element-wise updates equal one of the whole."""
    whole = make(format, grad_dtype, 67, rule=rule, moments=moments, seed=4, hostile=True)
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
    n=st.integers(0, 600),
    rule=st.sampled_from(list(RULES)),
    kind=st.sampled_from(["fp32", "bf16", "8bit"]),
    lr=st.floats(0, 10),
    beta1=st.one_of(st.sampled_from([0.0, 0.5, 0.9]), st.floats(0, 1, exclude_max=True)),
    beta2=st.one_of(st.sampled_from([0.0, 0.999]), st.floats(0, 1, exclude_max=True)),
    beta3=st.one_of(st.sampled_from([0.0, 0.9999]), st.floats(0, 1, exclude_max=True)),
    alpha=st.one_of(st.just(0.0), st.floats(0, 100)),
    t_alpha=st.integers(0, 20),
    t_beta3=st.integers(0, 20),
    eps=st.one_of(st.sampled_from([0.0, 1e-45, 1e-40]), st.floats(0, 1)),
    weight_decay=st.one_of(st.just(0.0), st.floats(0, 1)),
    momentum=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 2)),
    dampening=st.floats(-1, 1),
    nesterov=st.booleans(),
    lr_decay=st.floats(0, 1),
    step=st.one_of(st.integers(1, 20), st.integers(1, 10**12)),
    key=st.integers(0, 2**64 - 1),
    first=st.integers(0, 2**54).map(lambda block: block * BLOCK),
    grad_scale=st.one_of(st.just(1.0), st.floats(-1e30, 1e30)),
)
def test_any_values_and_coefficients(
    make: Callable[..., Any], seed: int, n: int, rule: str, kind: str, **hyper: Any
) -> None:
    for format in ("fp32", "remainder", "master", "master_fp16"):
        whole = make(format, "fp32", n, rule=rule, moments=kind, seed=seed, hostile=True)
        expected = whole.copy().call("plain", **hyper)
        for isa in _adam.available_isas():
            whole.copy(MISALIGNED[0]).call(isa, **hyper).assert_same(expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_bare_pass_stays_inside_and_writes_what_it_says(threads: int) -> None:
    rng = np.random.default_rng(5)
    sizes = [0, 1, 63, 64, 65, 4096, 4097, 1_000_003, 3_906]
    arrays = [rng.integers(0, 256, size + 128, dtype=np.uint8) for size in sizes]
    before = [array.copy() for array in arrays]
    writes = [k % 3 != 0 for k in range(len(sizes))]
    _adam.bare(
        [(a.ctypes.data + 64, size, write) for a, size, write in zip(arrays, sizes, writes, strict=True)], threads
    )
    for array, old, size, write in zip(arrays, before, sizes, writes, strict=True):
        whole = size // 64 * 64 if write else 0
        inside = slice(64, 64 + whole)
        assert np.array_equal(array[inside].view(np.uint32), old[inside].view(np.uint32) + np.uint32(1))
        array[inside] = old[inside]
        assert np.array_equal(array, old)
    with pytest.raises(ValueError, match="null address"):
        _adam.bare([(0, 64, True)])
    with pytest.raises(ValueError, match="not at a word's"):
        _adam.bare([(arrays[-1].ctypes.data + 1, 64, False)])
    _adam.bare([])
