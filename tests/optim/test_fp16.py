"""fp16 gradients and parameters: every instruction set converts as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.native import _adam
from support.adam_arrays import PLAIN

Array = npt.NDArray[Any]
HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def widen(halves: Array, isa: str) -> Array:
    """fp16 patterns to fp32 patterns: SGD's moment without momentum is the gradient; -0 + x is x, zeros included."""
    n = halves.size
    param, moment = np.zeros(n, np.float32), np.full(n, -0.0, np.float32)
    _adam.update("sgd", param=param.ctypes.data, master=0, grad=halves.ctypes.data, moments=[moment.ctypes.data],
                 scales=[], n=n, format="fp32", grad_dtype="fp16", moment_format="fp32", step=1, isa=isa,
                 **PLAIN | {"lr": 0.0})  # fmt: skip
    return moment.view(np.uint32)


def narrow(values: Array, isa: str) -> Array:
    """fp32 patterns to fp16 patterns: a parameter after a step of length 0."""
    n = values.size
    param, master, zeros = np.zeros(n, np.uint16), values.copy(), np.zeros((3, n), np.float32)
    _adam.update("adamw", param=param.ctypes.data, master=master.ctypes.data, grad=zeros[0].ctypes.data,
                 moments=[zeros[1].ctypes.data, zeros[2].ctypes.data], scales=[], n=n, format="master_fp16",
                 grad_dtype="fp32", moment_format="fp32", step=1, isa=isa,
                 **PLAIN | {"lr": 0.0})  # fmt: skip
    nan = np.isnan(values.view(np.float32))
    assert np.array_equal(master, np.where(nan, 0x7FC00000, values))
    return param


def check_narrow(values: Array, isa: str) -> None:
    by_torch = torch.from_numpy(values.view(np.float32)).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    expected = np.where(np.isnan(values.view(np.float32)), 0x7E00, by_torch)
    np.testing.assert_array_equal(narrow(values, isa), expected)


def test_every_half(isa: str) -> None:
    by_torch = torch.from_numpy(HALVES.view(np.int16)).view(torch.float16).float().view(torch.int32).numpy()
    expected = by_torch.view(np.uint32)
    nan = (HALVES & 0x7FFF) > 0x7C00
    np.testing.assert_array_equal(widen(HALVES, isa), np.where(nan, 0x7FC00000, expected))


def test_halves_their_ties_and_the_neighbours_of_both(isa: str) -> None:
    values = HALVES[(HALVES & 0x7C00) != 0x7C00].view(np.float16).astype(np.float32)
    with np.errstate(over="ignore"):
        after = np.nextafter(values.astype(np.float16), np.copysign(np.float16(np.inf), values).astype(np.float16))
    above = np.where(np.isinf(after), np.copysign(np.float32(65536), values), after.astype(np.float32))
    ties = ((values.astype(np.float64) + above) / 2).astype(np.float32)
    bits = np.concatenate([values, ties]).view(np.uint32)
    signs, magnitudes = bits & 0x80000000, bits & 0x7FFFFFFF
    near = [signs | np.maximum(magnitudes.astype(np.int64) + by, 0).astype(np.uint32) for by in (-2, -1, 0, 1, 2)]
    check_narrow(np.concatenate(near), isa)


def test_a_strided_cover_of_all_patterns(isa: str) -> None:
    check_narrow(np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32), isa)


def test_back_and_forth(isa: str) -> None:
    nan = (HALVES & 0x7FFF) > 0x7C00
    np.testing.assert_array_equal(narrow(widen(HALVES, isa), isa), np.where(nan, 0x7E00, HALVES))
