"""Calls of `infinity.native._adam_cuda` on the arrays of support/adam_arrays.py, wherever its kernels run: on a
device, or as host code (tests/optim/cuda_on_cpu). What both are tried on is here, so that they are tried on the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from infinity.native import _adam
from infinity.plan.frozen import CODED_DTYPES, RECORD, FrozenCode
from infinity.tiers import frozen
from support.adam_arrays import ALIGNED, GUARD, HYPER, Array, Problem, guarded, make_problem, random_bits

MISALIGNED = (
    (1,) * 9,
    (1, 0, 0, 0, 0, 0, 1, 0, 0),
    (0, 1, 0, 3, 5, 0, 0, 1, 1),
    (0, 0, 1, 7, 1, 2, 0, 0, 0),
    (4, 8, 4, 12, 4, 8, 1, 1, 1),
    (0, 0, 0, 0, 0, 1, 0, 0, 0),
)
GRADS = ("fp32", "bf16", "fp16")


class Placed(Protocol):
    address: int

    def get(self) -> Array:
        """The array as it is now; fails if something was written around it."""


class InHostMemory:
    """`values` between guards, `offset` elements after a boundary of 64 bytes."""

    def __init__(self, values: Array, offset: int = 0) -> None:
        self._array = guarded(values, offset)
        self.address = self._array.ctypes.data

    def get(self) -> Array:
        check_guards(self._array)
        return self._array


def check_guards(view: Array) -> None:
    raw = view
    while isinstance(raw.base, np.ndarray):
        raw = raw.base
    start = view.ctypes.data - raw.ctypes.data
    assert (np.delete(raw, np.s_[start : start + view.nbytes]) == GUARD).all(), "written outside"


@dataclass(frozen=True)
class CudaKernels:
    native: Any
    place: Callable[[Array, int], Placed] = InHostMemory
    stream: int = 0

    def update(self, problem: Problem, offsets: Sequence[int] = ALIGNED, **hyper: Any) -> Problem:
        """A copy of `problem` after one step."""
        placed = {
            name: None if array is None else self.place(array, offset)
            for (name, array), offset in zip(problem.arrays.items(), offsets, strict=True)
        }
        given = problem.arguments() | {n: p.address if (p := placed[n]) else 0 for n in ("param", "master", "grad")}
        for kind in ("moment", "scale"):
            given[f"{kind}s"] = [p.address for k in range(3) if (p := placed[f"{kind}{k}"])]
        self.native.update(**(given | HYPER | hyper), device=0, stream=self.stream)
        arrays = {name: p.get() if p else None for name, p in placed.items()}
        return Problem(problem.format, problem.grad_dtype, problem.n, problem.rule, problem.moments, arrays)

    def sum_of_squares(self, values: Array, dtype: str, offset: int = 0, chained: bool = False, **numbers: Any) -> int:
        """The sum's bits. chained: `initial` is read from, and the result written to, one address."""
        n = values.size
        at, tiles = self.place(values, offset), self.place(np.zeros(max(1, -(-n // 4096)), np.float64), 0)
        out = self.place(np.array([numbers.get("initial", 0.0) if chained else 7.0], np.float64), 0)
        if chained:
            numbers["initial_at"] = out.address
        results = {"out": out.address, "tiles": tiles.address, "device": 0, "stream": self.stream}
        self.native.sum_of_squares(at.address, n, dtype, **results, **numbers)
        tiles.get()
        return int(out.get().view(np.uint64)[0])

    def fingerprint(self, words: Array, offset: int) -> int:
        """The hash, added to 7."""
        at, out = self.place(words, offset), self.place(np.array([7], np.uint64), 0)
        self.native.fingerprint(at.address, words.nbytes, out=out.address, device=0, stream=self.stream)
        return int(out.get()[0])

    def split(self, master: Array, offset: int) -> tuple[Array, Array]:
        halves = [self.place(np.zeros(master.size, dtype), offset) for dtype in (np.uint16, np.int16)]
        placed = [self.place(master, offset), *halves]
        self.native.split(*[array.address for array in placed], master.size, device=0, stream=self.stream)
        return halves[0].get(), halves[1].get()

    def join(self, param: Array, remainder: Array, offset: int) -> Array:
        placed = [self.place(array, offset) for array in (param, remainder, np.zeros(param.size, np.uint32))]
        self.native.join(*[array.address for array in placed], param.size, device=0, stream=self.stream)
        return placed[2].get()


def check_updates(kernels: CudaKernels, format: str, rule: str, moments: str, sizes: Sequence[int]) -> None:
    """Every gradient dtype, usual and hostile values, aligned and not, against the oracle."""
    for grad_dtype in GRADS:
        for hostile in (False, True):
            whole = make_problem(format, grad_dtype, max(sizes), rule=rule, moments=moments, seed=11, hostile=hostile)
            for turn, n in enumerate(sizes):
                offsets = ALIGNED if (turn + hostile) % 2 else MISALIGNED[turn % len(MISALIGNED)]
                hyper = {"nesterov": bool(turn % 2), "weight_decay": 0.1 * (turn % 3), "step": 1 + turn % 2}
                expected = whole.copy(n=n).call("plain", **hyper)
                kernels.update(whole.copy(n=n), offsets, **hyper).assert_same(expected, (grad_dtype, hostile, n))


def check_numbers_of_elements(kernels: CudaKernels, moments: str) -> None:
    """Random bits are of the element's number, beyond 2^32 too."""
    for first in (0, 256, (1 << 32) - 512, (1 << 40) + 256):
        problem = make_problem("remainder", "bf16", 1025, moments=moments, seed=12)
        expected = problem.copy().call("plain", first=first)
        kernels.update(problem, first=first).assert_same(expected, first)


def check_sums(kernels: CudaKernels, dtype: str, sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(13)
    for n in sizes:
        for hostile in (False, True):
            bits = random_bits(rng, n, hostile=hostile)
            if dtype != "fp32":
                bits = (bits >> 16).astype(np.uint16)
            for scale, initial, chained in ((1.0, 0.0, False), (1 / 3, 1e-3, False), (0.1, 2.5, True)):
                expected = _adam.sum_of_squares(bits.ctypes.data, n, dtype, scale=scale, initial=initial, isa="plain")  # type: ignore[arg-type]
                numbers = {"scale": scale, "initial": initial}
                found = kernels.sum_of_squares(bits, dtype, n % 3, chained, **numbers)
                assert found == int(np.float64(expected).view(np.uint64)), (n, hostile, scale)


def check_halves(kernels: CudaKernels, sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(14)
    for n in sizes:
        for offset in (0, 1, 4):
            master = random_bits(rng, n, hostile=True)
            high, low, back = np.zeros(n, np.uint16), np.zeros(n, np.int16), np.zeros(n, np.uint32)
            _adam.split(master.ctypes.data, high.ctypes.data, low.ctypes.data, n, isa="plain")
            _adam.join(high.ctypes.data, low.ctypes.data, back.ctypes.data, n, isa="plain")
            found = kernels.split(master, offset)
            np.testing.assert_array_equal(found[0], high)
            np.testing.assert_array_equal(found[1], low)
            np.testing.assert_array_equal(kernels.join(high, low, offset), back)


def check_fingerprints(kernels: CudaKernels, sizes: Sequence[int]) -> None:
    """sizes: in words of 8 bytes. Arrays that begin in the middle of 16 bytes, too."""
    rng = np.random.default_rng(15)
    for n in sizes:
        for offset in (0, 1):
            words = rng.integers(0, 1 << 64, n, np.uint64)
            expected = _adam.fingerprint(words.ctypes.data, words.nbytes, isa="plain")
            assert kernels.fingerprint(words, offset) == (expected + 7) % (1 << 64), (n, offset)


def check_frozen(kernels: CudaKernels, sizes: Sequence[int]) -> None:
    """Every code and dtype, into other memory and in place. sizes: in records."""
    for format, (dtype, name), records in product(("8bit", "nf4"), CODED_DTYPES.items(), sizes):
        code, n = FrozenCode(format, dtype), records * RECORD  # type: ignore[arg-type]
        weight = torch.randn(n, generator=torch.Generator().manual_seed(records)).to(dtype)
        stored, _ = frozen.encode(code, weight)
        expected = np.zeros(weight.nbytes, np.uint8)
        frozen.decode(code, stored, torch.from_numpy(expected))
        within = np.zeros(weight.nbytes, np.uint8)
        code.stored_in(torch.from_numpy(within)).copy_(stored)
        records_at = weight.nbytes - code.records_nbytes(n)
        apart, target = kernels.place(code.records_of(stored, n).numpy(), 0), kernels.place(np.zeros_like(within), 0)
        whole = kernels.place(within, 0)
        where = {"code": format, "dtype": name, "device": 0, "stream": kernels.stream}
        kernels.native.decode_frozen(apart.address, target.address, n, **where)
        kernels.native.decode_frozen(whole.address + records_at, whole.address, n, **where)
        np.testing.assert_array_equal(target.get(), expected)
        np.testing.assert_array_equal(whole.get(), expected)
