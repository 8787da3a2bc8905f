"""Sums of floats: rounded after each number, in every version of Python."""

from __future__ import annotations

from infinity.sizes import sum_in_order


def test_each_sum_is_rounded() -> None:
    """`sum` of Python 3.12 gives 1 + 2**-52 and 2.0, since it compensates for rounding."""
    assert sum_in_order([1.0, 2.0**-53, 2.0**-53]) == 1.0
    assert sum_in_order([1.0, 1e100, 1.0, -1e100]) == 0.0


def test_a_sum_continues_another() -> None:
    values = [0.1 * 3.0**n for n in range(-20, 20)]
    assert sum_in_order([sum_in_order(values[:17]), *values[17:]]) == sum_in_order(values)


def test_no_values_are_zero() -> None:
    assert sum_in_order([]) == 0.0
