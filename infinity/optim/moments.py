"""Formats of moments: fp32, bf16, or 8 bits with a scale byte for each block of 256 elements.

`moment_from_fp32` and `moment_to_fp32` implement `csrc/adam/codec.h` in numpy, with the same bits. They convert between
formats; updates read and write moments natively.

8 bits: a block's scale s is the exponent field of its largest magnitude, at least 16. With delta = 2^(s - 141), codes
represent the magnitudes ((1 + f) * 2^e - 1) * delta, with e of 4 bits. Signed codes have f = 0, 1/8, ..., 7/8. Unsigned
codes have f = 0, 1/16, ..., 15/16; they hold the square root of sums and means of squares, which halves the exponent
range. Values between two codes are rounded stochastically, which keeps the mean. With rounding to nearest, an average
that changes by less than half a code per step would never move. A nonzero root gets at least code 1, since updates
divide by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinity.plan.formats import BLOCK, FORMATS
from infinity.rules import RULES, MomentFormat, RuleName

_CONVERTED_AT_ONCE = 1 << 22
_OCTAVES = 14
_LEAST_SCALE = _OCTAVES + 2
_NOT_FINITE = 255
_NAN = np.uint32(0x7FC00000)
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
Array = npt.NDArray[Any]


def zero_moments(rule: RuleName, n: int, kind: MomentFormat) -> tuple[list[Tensor], list[Tensor]]:
    """Return (moments, scales) of n elements before the first step, as `update_flat` takes them."""
    count = len(RULES[rule].moments)
    scales = [torch.zeros(-(-n // BLOCK), dtype=torch.uint8) for _ in range(count if kind == "8bit" else 0)]
    return [torch.zeros(n, dtype=FORMATS[kind]) for _ in range(count)], scales


def moment_to_fp32(moment: Tensor, scale: Tensor | None = None, *, root: bool = False) -> Tensor:
    """Return the values of a moment: fp32, in the moment's shape. Exact, except squares of roots, which are rounded.

    moment: fp32, bf16, or uint8 codes with their `scale`, uint8 (ceil(numel / 256),). On the CPU.
    root: codes hold the square root (`Rule.roots`); ignored for other formats.
    """
    if moment.dtype != torch.uint8:
        return moment.to(torch.float32, copy=True)
    codes = moment.detach().contiguous().view(-1).numpy()
    _check_scale(scale, codes.size)
    assert scale is not None
    scales = np.repeat(scale.contiguous().numpy(), BLOCK)[: codes.size]
    octave, fraction = ((codes >> 4), 1 + (codes & 15) / 16) if root else ((codes >> 3) & 15, 1 + (codes & 7) / 8)
    exponents = scales.astype(np.int32) - 127 - _OCTAVES
    with np.errstate(over="ignore", under="ignore"):  # to infinity and zero, as natively
        values = np.ldexp(np.ldexp(fraction, octave) - 1, exponents).astype(np.float32)
        values = values * values if root else np.where(codes & 0x80, -values, values)
    values[scales == _NOT_FINITE] = np.nan
    return torch.from_numpy(values).view(moment.shape)


def moment_from_fp32(
    values: Tensor, kind: MomentFormat, *, root: bool = False, key: int = 0, first: int = 0, moment: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return (moment in `values`' shape, scale or None), with the bits that an update stores for these values.

    values: fp32 on the CPU. root: 8-bit codes hold the square root; values must not be negative.
    key, first: seed and element offset of the rounding, see `_adam.update`. moment: index of the moment in the rule, 0
        to 2; each uses different random bits.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"values are {values.dtype}: pass torch.float32")
    flat = values.detach().contiguous().view(-1).numpy()
    if kind == "fp32":
        bits = np.where(np.isnan(flat), _NAN, flat.view(np.uint32))
        return torch.from_numpy(bits.view(np.float32)).view(values.shape), None
    random = _random_bits(key, first, flat.size)
    if kind == "bf16":
        bits = np.where(np.isnan(flat), _NAN, flat.view(np.uint32))
        high = ((bits + _chance(random, moment, 16)) >> 16).astype(np.uint16)
        return torch.from_numpy(high.view(np.int16)).view(torch.bfloat16).view(values.shape), None
    with np.errstate(invalid="ignore", over="ignore"):
        codes, scales = _encode(np.sqrt(flat) if root else flat, root, random, moment)
    return torch.from_numpy(codes).view(values.shape), torch.from_numpy(scales)


def rounding_key(seed: int, step: int) -> int:
    """Return the key of a step's stochastic rounding, for `_adam.update`. Keys of different seeds are far apart."""
    return (seed * _GOLDEN + step) % (1 << 64)


def fp32_moment(rule: RuleName, name: str, states: Mapping[str, Tensor]) -> Tensor:
    """Return a copy in fp32 of the moment `name`. states: a parameter's states by name, moments in any format."""
    codes = states.get(f"{name}_8bit")
    if codes is None:
        return moment_to_fp32(states[name])
    return moment_to_fp32(codes, states[f"{name}_scale"], root=name in RULES[rule].roots)


def convert_moments(
    rule: RuleName, source: Mapping[str, Tensor], target: Mapping[str, Tensor], *, key: int, first: int
) -> None:
    """Fill the moments of `target` from `source`. Both map names to states of n elements, in any formats."""
    for name in RULES[rule].moments:
        convert_moment(rule, name, source, target, key=key, first=first)


def convert_moment(
    rule: RuleName,
    name: str,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    *,
    key: int,
    first: int,
) -> None:
    """Fill one moment of `target` from `source`, which may lack the others. Tensors are in host memory.

    Exact if the target's format can represent the value, else rounded as in an update; see `_adam.update` for key and
    first. Converts a few million elements at a time to bound temporary memory.
    """
    values, scales = source.get(name), None
    if values is None:
        values, scales = source[f"{name}_8bit"], source[f"{name}_scale"]
    eight = f"{name}_8bit" in target
    into = target[f"{name}_8bit" if eight else name]
    kind = next(kind for kind, dtype in FORMATS.items() if dtype == into.dtype)
    root, moment = name in RULES[rule].roots, RULES[rule].moments.index(name)
    flat, goal = values.reshape(-1), into.view(-1)
    for start in range(0, flat.numel(), _CONVERTED_AT_ONCE):
        part = slice(start, start + _CONVERTED_AT_ONCE)
        blocks = slice(start // BLOCK, -(-min(part.stop, flat.numel()) // BLOCK))
        fp32 = moment_to_fp32(flat[part], None if scales is None else scales[blocks], root=root)
        stored, scale = moment_from_fp32(fp32, kind, root=root, key=key, first=first + start, moment=moment)
        goal[part] = stored
        if scale is not None:
            target[f"{name}_scale"][blocks] = scale


def _encode(flat: Array, root: bool, random: Array, moment: int) -> tuple[Array, Array]:
    """Return 8-bit codes (n,) and scales (ceil(n / 256),) of fp32 values (n,), which are roots if `root`."""
    n = flat.size
    blocks = np.zeros((-(-n // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[:n] = flat
    finite = np.asarray(np.isfinite(blocks).all(axis=1))
    magnitudes = np.where(finite[:, None], np.abs(blocks), np.float32(0))
    exponents = magnitudes.max(axis=1, initial=0).view(np.uint32) >> 23
    scales = np.where(finite, np.maximum(exponents, _LEAST_SCALE), _NOT_FINITE).astype(np.uint8)
    delta = ((scales.astype(np.uint32) - _OCTAVES) << 23)[:, None]
    shifted = (magnitudes + delta.view(np.float32)).view(np.uint32)
    cut = 19 if root else 20
    chances = np.zeros(blocks.shape, np.uint32)
    chances.reshape(-1)[:n] = _chance(random, moment, cut)
    codes = ((shifted + chances - delta) >> cut).astype(np.uint8)
    if root:  # a nonzero root must not become 0, since updates divide by it
        codes = np.maximum(codes, ((blocks.view(np.uint32) + np.uint32(0x7FFFFFFF)) >> np.uint32(31)).astype(np.uint8))
    else:
        codes |= np.where(np.signbit(blocks), np.uint8(0x80), np.uint8(0))
    codes[~finite] = 0
    return codes.reshape(-1)[:n].copy(), scales


def _chance(random: Array, moment: int, cut: int) -> Array:
    """Return the random bits that round `cut` dropped bits: the highest for moment 0, the lowest for moment 1, the
    highest of a product for moment 2.
    """
    if moment == 1:
        return np.asarray(random & np.uint32((1 << cut) - 1))
    with np.errstate(over="ignore"):
        random = random * np.uint32(0x9E3779B1) if moment == 2 else random
    return np.asarray(random >> np.uint32(32 - cut))


def _random_bits(key: int, first: int, n: int) -> Array:
    """Return 32 random bits, uint32 (n,), for the elements first, ..., first + n - 1.

    Multiplies the low half of the element number by a constant, adds a 32-bit digest of the key and the number's high
    half (the finaliser of splitmix64, Vigna), and mixes by one multiplication between two xorshifts. Constants and
    shifts were found by search, after Wellons ("Prospecting for hash functions", 2018). Consecutive numbers correlate
    less than with his lowbias32, whose two rounds take twice the instructions.
    """
    number = np.arange(n, dtype=np.uint64) + np.uint64(first)
    with np.errstate(over="ignore"):
        x = np.uint64(key) ^ ((number >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        y = number.astype(np.uint32) * np.uint32(0x85EBCA6B) + (x ^ (x >> np.uint64(31))).astype(np.uint32)
        y = (y ^ (y >> np.uint32(13))) * np.uint32(0x297A2D39)
    return np.asarray(y ^ (y >> np.uint32(12)))


def _check_scale(scale: Tensor | None, n: int) -> None:
    blocks = -(-n // BLOCK)
    if scale is None or scale.dtype != torch.uint8 or scale.numel() != blocks:
        raise ValueError(f"scale does not fit {n:,} codes: pass uint8 of {blocks:,} elements")
