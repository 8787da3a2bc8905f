"""fp32 = bf16 + 16-bit remainder: every pattern is restored, and the bf16 is the nearest, ties away from zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infinity.native import _adam
from infinity.optim.cpu_adam import join_master, join_master_torch, split_master, split_master_torch

Bits = npt.NDArray[Any]
CANONICAL_NAN = 0x7FC00000

# All 65,536 upper halves (every sign, exponent and bf16 mantissa) with lower halves around each place where something
# changes: nothing to round, the tie and its neighbours, the carry, and some in between.
LOWER = [0x0000, 0x0001, 0x0002, 0x1234, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xABCD, 0xC000, 0xFFFE, 0xFFFF]
FAMILIES = {
    "zeros": [0x00000000, 0x80000000],
    "smallest subnormals": [0x00000001, 0x80000001],
    "subnormals that round to zero": [0x00007FFF, 0x80007FFF],
    "the subnormal tie with zero": [0x00008000, 0x80008000],
    "largest subnormals": [0x007FFFFF, 0x807FFFFF],
    "smallest normals": [0x00800000, 0x80800000],
    "ties": [0x3F808000, 0xBF808000, 0x3F818000, 0xBF818000],
    "just below a tie": [0x3F807FFF, 0xBF807FFF],
    "carry into the exponent": [0x3FFF8000, 0xBFFF8000],
    "largest finite that stays finite in bf16": [0x7F7F7FFF, 0xFF7F7FFF],
    "finite that shows as infinity in bf16": [0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF],
    "infinities": [0x7F800000, 0xFF800000],
    "NaNs that would show as infinity": [0x7F800001, 0x7F807FFF, 0xFF800001],
    "NaNs that would wrap to zero": [0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF],
    "quiet NaNs": [0x7FC00000, 0xFFC00000, 0x7FC12345],
}


def is_nan(bits: Bits) -> Bits:
    return np.asarray((bits & 0x7FFFFFFF) > 0x7F800000)


def split(bits: Bits, isa: str = "auto", threads: int = 0) -> tuple[Bits, Bits]:
    param, remainder = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    _adam.split(bits.ctypes.data, param.ctypes.data, remainder.ctypes.data, bits.size, threads, isa)
    return param, remainder


def join(param: Bits, remainder: Bits, isa: str = "auto", threads: int = 0) -> Bits:
    bits = np.empty(param.size, np.uint32)
    _adam.join(param.ctypes.data, remainder.ctypes.data, bits.ctypes.data, param.size, threads, isa)
    return bits


def expected_bf16(bits: Bits) -> Bits:
    """Return the nearest bf16 by fp64 arithmetic, ties to the larger magnitude, independently of the kernel."""
    magnitude = bits & 0x7FFFFFFF
    below = (magnitude >> 16).astype(np.uint32)

    def value(pattern: Bits) -> npt.NDArray[np.float64]:
        # the pattern after the largest finite bf16 counts as 2^128, one step on, as rounding sees it
        plain = np.minimum(pattern, 0x7F7F0000).astype(np.uint32).view(np.float32).astype(np.float64)
        return np.asarray(np.where(pattern >= 0x7F800000, 2.0**128, plain))

    finite = np.minimum(magnitude, 0x7F7FFFFF).astype(np.uint32).view(np.float32).astype(np.float64)
    exact = np.where(magnitude >= 0x7F800000, 2.0**128, finite)
    lower, upper = value(below << 16), value((below + 1) << 16)
    rounded = np.where(exact - lower < upper - exact, below, below + 1)
    rounded = np.where(magnitude == below << 16, below, rounded)
    rounded = rounded | ((bits >> 31) << 15)
    return np.where(is_nan(bits), 0x7FC0, rounded).astype(np.uint16)


def check(bits: Bits, isa: str) -> None:
    param, remainder = split(bits, isa)
    np.testing.assert_array_equal(param, expected_bf16(bits))
    np.testing.assert_array_equal(join(param, remainder, isa), np.where(is_nan(bits), CANONICAL_NAN, bits))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_by_name(family: str, isa: str) -> None:
    check(np.array(FAMILIES[family] * 9, np.uint32), isa)


def test_every_upper_half_with_lower_halves_around_each_boundary(isa: str) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    check((upper[:, None] | np.array(LOWER, np.uint32)).ravel(), isa)


def test_a_strided_cover_of_all_patterns(isa: str) -> None:
    check(np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32), isa)  # a prime: every lower half occurs


def test_counts_that_the_design_states() -> None:
    """Counts finite values that become infinity, and ties that differ from torch's cast, over all upper halves."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = upper | 0x8000
    finite = ties[(ties & 0x7F800000) != 0x7F800000]
    native = split(finite)[0]
    torch_cast = torch.from_numpy(finite.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert int((native != torch_cast).sum()) == 32_640
    last = np.concatenate([np.uint32(s) | np.arange(0x7F7F0000, 0x7F800000, dtype=np.uint32) for s in (0, 1 << 31)])
    param, remainder = split(last)
    assert int(((param & 0x7FFF) == 0x7F80).sum()) == 65_536
    np.testing.assert_array_equal(join(param, remainder), last)


@pytest.mark.parametrize("n", [*range(70), 65_535, 65_536, 65_537, 100_003])
def test_sizes_alignment_and_threads(n: int, isa: str) -> None:
    source = np.random.default_rng(n).integers(0, 1 << 32, n + 1, dtype=np.uint32)[1:]
    param, remainder = np.zeros(n + 2, np.uint16), np.zeros(n + 2, np.int16)
    master = np.zeros(n + 2, np.uint32)
    for threads in (1, 3):
        addresses = param[1:].ctypes.data, remainder[1:].ctypes.data
        _adam.split(source.ctypes.data, *addresses, n, threads, isa)
        _adam.join(*addresses, master[1:].ctypes.data, n, threads, isa)
        np.testing.assert_array_equal(param[1:-1], expected_bf16(source))
        np.testing.assert_array_equal(master[1:-1], np.where(is_nan(source), CANONICAL_NAN, source))
        assert param[0] == param[-1] == remainder[0] == remainder[-1] == master[0] == master[-1] == 0


def test_torch_version_is_the_same() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = (upper[:, None] | np.array(LOWER, np.uint32)).ravel()
    master = torch.from_numpy(bits.view(np.float32))
    param, remainder = split_master(master)
    param_torch, remainder_torch = split_master_torch(master)
    assert torch.equal(param.view(torch.int16), param_torch.view(torch.int16))
    assert torch.equal(remainder, remainder_torch)
    joined, joined_torch = join_master(param, remainder), join_master_torch(param, remainder)
    assert torch.equal(joined.view(torch.int32), joined_torch.view(torch.int32))


def test_torch_join_of_any_two_halves() -> None:
    rng = np.random.default_rng(0)
    param = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, 100_000, dtype=np.int16)).view(torch.bfloat16)
    remainder = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, 100_000, dtype=np.int16))
    native, by_torch = join_master(param, remainder), join_master_torch(param, remainder)
    assert torch.equal(native.view(torch.int32), by_torch.view(torch.int32))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_four_billion_patterns(isa: str) -> None:
    """Tests all patterns, in pieces that fit in the cache."""
    size = 1 << 19
    counter = np.arange(size, dtype=np.uint32)
    for start in range(0, 1 << 32, size):
        bits = counter + np.uint32(start)
        expected = np.where(is_nan(bits), np.uint32(CANONICAL_NAN), bits)
        param, remainder = split(bits, isa)
        assert np.array_equal(param, ((expected + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)), hex(start)
        assert np.array_equal(join(param, remainder, isa), expected), hex(start)
        if isa == _adam.default_isa():
            param_torch, remainder_torch = split_master_torch(torch.from_numpy(bits.view(np.float32)))
            assert np.array_equal(param_torch.view(torch.int16).numpy().view(np.uint16), param), hex(start)
            assert np.array_equal(remainder_torch.numpy(), remainder), hex(start)
