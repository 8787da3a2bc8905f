"""Flat arrays with the full variety of values, and one call of the native kernel on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infinity.native import _adam
from infinity.optim.moments import moment_from_fp32, moment_to_fp32
from infinity.plan.formats import BLOCK
from infinity.rules import RULES, Hyper

Array = npt.NDArray[Any]

HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.1,
    "nesterov": False,
    "lr_decay": 0.01,
    "beta3": 0.99,
    "alpha": 3.0,
    "t_alpha": 5,
    "t_beta3": 7,
    "step": 3,
    "key": 0x0123456789ABCDEF,
    "first": 7 * BLOCK,
}
PLAIN: dict[str, Any] = {name: value for name, value in HYPER.items() if name not in ("step", "key", "first")}
PLAIN |= {"beta2": 0.999} | dict.fromkeys(("weight_decay", "momentum", "dampening", "lr_decay"), 0.0)
"""Constants of all rules, without decay and momentum."""
NAMES = ("param", "master", "grad", *(f"moment{k}" for k in range(3)), *(f"scale{k}" for k in range(3)))
ALIGNED = (0,) * len(NAMES)
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


def hyper_for(rule: Any, **given: Any) -> Hyper:
    """Return hyper-parameters of the rule, with those of `given` that it has."""
    return Hyper(rule, **{name: value for name, value in given.items() if name in RULES[rule].keys})


def has_root(rule: str, k: int) -> bool:
    """Return True if 8-bit codes store the square root of moment k."""
    row = RULES[rule]  # type: ignore[index]
    return row.moments[k] in row.roots


@dataclass
class Problem:
    """Arrays by NAMES, bit patterns as unsigned integers (remainder: int16), (n,), scales (ceil(n / BLOCK),); None
    where the case has no such array."""

    format: Any
    grad_dtype: Any
    n: int
    rule: Any = "adamw"
    moments: Any = "fp32"
    arrays: dict[str, Array | None] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """All that describes the arrays to `_adam.update`."""
        given: dict[str, Any] = {"rule": self.rule, "n": self.n, "format": self.format, "grad_dtype": self.grad_dtype}
        given |= {name: self.address(name) for name in ("param", "master", "grad")}
        for kind in ("moment", "scale"):
            given[f"{kind}s"] = [self.address(f"{kind}{k}") for k in range(3) if self.arrays[f"{kind}{k}"] is not None]
        return given | {"moment_format": self.moments}

    def address(self, name: str) -> int:
        array = self.arrays[name]
        return 0 if array is None else array.ctypes.data

    def call(self, isa: str = "auto", threads: int = 0, **hyper: Any) -> Problem:
        _adam.update(**(self.arguments() | {"isa": isa, "threads": threads} | HYPER | hyper))
        return self

    def copy(self, offsets: tuple[int, ...] = ALIGNED, n: int | None = None, begin: int = 0) -> Problem:
        """Elements [begin, n), each array `offsets` elements past a 64-byte boundary. begin: a multiple of BLOCK."""
        n = self.n if n is None else n
        arrays: dict[str, Array | None] = {}
        for (name, array), offset in zip(self.arrays.items(), offsets, strict=True):
            per = BLOCK if name.startswith("scale") else 1
            arrays[name] = None if array is None else guarded(array[begin // per : -(-n // per)], offset)
        return Problem(self.format, self.grad_dtype, n - begin, self.rule, self.moments, arrays)

    def assert_same(self, other: Problem, case: object = "") -> None:
        for name, array in self.arrays.items():
            expected = other.arrays[name]
            if array is not None and expected is not None and not np.array_equal(array, expected):
                at = np.flatnonzero(array != expected)
                pytest.fail(f"{case} {name}: {at.size} of {self.n} differ, first [{at[0]}] {array[at[0]]:#x}")

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

    def with_fp32_moments(self) -> Problem:
        """The same problem with the values of its moments in fp32."""
        arrays = dict(self.copy().arrays)
        for k in range(len(RULES[self.rule].moments)):
            moment, scale = arrays[f"moment{k}"], arrays[f"scale{k}"]
            assert moment is not None
            tensor = torch.from_numpy(moment)
            tensor = tensor.view(torch.bfloat16) if self.moments == "bf16" else tensor
            tensor = tensor.view(torch.float32) if self.moments == "fp32" else tensor
            kept = None if scale is None else torch.from_numpy(scale)
            arrays[f"moment{k}"] = moment_to_fp32(tensor, kept, root=has_root(self.rule, k)).numpy().view(np.uint32)
            arrays[f"scale{k}"] = None
        return Problem(self.format, self.grad_dtype, self.n, self.rule, "fp32", arrays).copy()

    def with_moments_as(self, kind: Any, key: int, first: int) -> Problem:
        """Return the same problem with its fp32 moments converted to `kind` by the Python code."""
        arrays = dict(self.arrays)
        for k in range(len(RULES[self.rule].moments)):
            values = arrays[f"moment{k}"]
            assert values is not None
            stored, scale = moment_from_fp32(
                torch.from_numpy(values.view(np.float32)),
                kind,
                root=has_root(self.rule, k),
                key=key,
                first=first,
                moment=k,
            )
            arrays[f"moment{k}"] = (
                stored.view(torch.int16).numpy().view(np.uint16) if kind == "bf16" else stored.numpy()
            )
            arrays[f"scale{k}"] = None if scale is None else scale.numpy()
        return Problem(self.format, self.grad_dtype, self.n, self.rule, kind, arrays)


def make_moment(rng: np.random.Generator, rule: str, k: int, kind: str, n: int, hostile: bool) -> tuple[Array, Any]:
    """(moment, scale or None)."""
    if kind == "8bit":  # mostly usual scales, so that not all blocks become NaN
        blocks = -(-n // BLOCK)
        scales = rng.integers(90, 135, blocks)
        if hostile:
            some = rng.integers(0, 3, blocks) == 0
            scales[some] = rng.choice([16, 17, 40, 63, 64, 190, 240, 253, 255], int(some.sum()))
        return rng.integers(0, 256, n).astype(np.uint8), scales.astype(np.uint8)
    values = random_bits(rng, n, hostile=hostile)
    if has_root(rule, k):
        values[rng.integers(0, 8, n) >= hostile] &= 0x7FFFFFFF  # a hostile few stay negative: the root of those is NaN
    return (values if kind == "fp32" else (values >> 16).astype(np.uint16)), None


def make_problem(
    format: str,
    grad_dtype: str,
    n: int,
    *,
    rule: Any = "adamw",
    moments: str = "fp32",
    seed: int = 0,
    hostile: bool = False,
) -> Problem:
    rng = np.random.default_rng(seed)
    master = random_bits(rng, n, hostile=hostile)
    grad = random_bits(rng, n, hostile=hostile)
    if hostile and moments == "8bit":  # one NaN makes a block NaN: leave blocks without
        calm = np.repeat(rng.integers(0, 2, -(-n // BLOCK)), BLOCK)[:n] == 0
        grad[calm] = random_bits(rng, n, hostile=False)[calm]
    param: Array = master
    kept: Array | None = None
    if format == "remainder":  # any two halves, not only those that split() writes
        param, kept = (master >> 16).astype(np.uint16), master.astype(np.uint16).view(np.int16)
    elif format != "fp32":
        param, kept = np.zeros(n, np.uint16), master
    if grad_dtype == "fp16":
        with np.errstate(over="ignore", invalid="ignore"):
            halves = grad.view(np.float32).astype(np.float16).view(np.uint16)
        grad = halves
    elif grad_dtype == "bf16":
        grad = (grad >> 16).astype(np.uint16)
    arrays: dict[str, Array | None] = dict.fromkeys(NAMES)
    arrays |= {"param": param, "master": kept, "grad": grad}
    for k in range(len(RULES[rule].moments)):
        arrays[f"moment{k}"], arrays[f"scale{k}"] = make_moment(rng, rule, k, moments, n, hostile)
    return Problem(format, grad_dtype, n, rule, moments, arrays).copy()
