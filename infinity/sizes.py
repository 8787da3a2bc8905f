"""Parses and formats sizes in bytes: 67108864, "64MiB", "1.5GB", "2e9".

Numbers with units, as people read them.

Sums of floats with the same bits in every version of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}
_FACTORS = _DECIMAL | _BINARY
_TEXT = re.compile(
    r"\s*(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*(?P<suffix>[a-z]*)\s*", re.ASCII | re.IGNORECASE
)
_EXAMPLES = 'write bytes as a number, or text such as "64MiB" (1024-based) or "1.5GB" (1000-based)'
_LARGEST = 2**63 - 1


def parse_size(value: int | float | str) -> int:
    """Return `value` in bytes.

    Units such as MB are powers of 1000, units such as MiB powers of 1024, in any case. Text is parsed exactly, without
    a float in between; a part of a byte beside at least a megabyte, as in "1.2GiB", is dropped. Zero is valid.

    Raises ValueError if `value` is no size, is negative, does not fit in 63 bits, or else is no whole number of bytes.
    """
    size = _exact(value)
    if size < 0:
        raise ValueError(f"a size cannot be negative, as {value!r} is")
    if size.denominator != 1 and not (isinstance(value, str) and size >= _DECIMAL["mb"]):
        raise ValueError(f"{value!r} is {float(size):g} bytes, which is not a whole number of bytes")
    if size > _LARGEST:
        raise ValueError(f"{value!r} is more than {_LARGEST} bytes")
    return int(size)


def _exact(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a size; {_EXAMPLES}")
    if not isinstance(value, str):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{value!r} is not a size; {_EXAMPLES}")
        return Fraction(value)
    match = _TEXT.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; {_EXAMPLES}")
    factor = _FACTORS.get(match["suffix"].lower())
    if factor is None:
        raise ValueError(f"{value!r} ends in {match['suffix']!r}, which is not a unit of size; {_instead(match)}")
    return Fraction(match["number"].replace("_", "")) * factor


def _instead(match: re.Match[str]) -> str:
    """Return what to write in place of a text whose unit is unknown. Docker and Slurm read 700M as 700MiB."""
    unit = match["suffix"].upper()
    if unit in ("K", "M", "G", "T", "P"):
        number = match["number"].lstrip("+-")
        return f'write "{number}{unit}iB" (1024-based, as Docker and Slurm mean it) or "{number}{unit}B" (1000-based)'
    return _EXAMPLES


def format_size(nbytes: int) -> str:
    """Return `nbytes` as text that `parse_size` inverts exactly: "64MiB" if a binary unit divides it, else digits."""
    for suffix, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{suffix}"
    return str(nbytes)


def show_bytes(count: float) -> str:
    """1_300_000_000 -> '1.30 GB'; decimal units, since disks and bandwidths are given in them."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) >= 100 * size else f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def show_count(count: float) -> str:
    """10_844_160 -> '10.8 M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def show_flops(count: float) -> str:
    """1_300_000_000 -> '1.3 GFLOP'."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}FLOP"
    return f"{count:.3g} FLOP"


def counted(count: int, noun: str) -> str:
    """(1, "unit") -> '1 unit', (1200, "unit") -> '1,200 units'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum of `values`, added one after the other, each sum rounded; 0.0 for none.

    `sum` of Python 3.12 and later compensates for rounding, so it differs from a sum that is continued from part to
    part, and from `sum` of earlier versions.
    """
    total = 0.0
    for value in values:
        total += value
    return total
