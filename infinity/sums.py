"""Sums of floats with the same bits in every version of Python."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["sum_in_order"]


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum of `values`, added one after the other, each sum rounded; 0.0 for none.

    `sum` of Python 3.12 and later compensates for rounding, so it differs from a sum that is continued from part to
    part, and from `sum` of earlier versions.
    """
    total = 0.0
    for value in values:
        total += value
    return total
