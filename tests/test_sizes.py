"""Sizes: what is accepted, what is refused and how, and that formatting is the inverse of parsing."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinity.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (67108864, 67108864),
        (1e9, 10**9),
        ("0", 0),
        ("123", 123),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("0.5KiB", 512),
        ("2e9", 2 * 10**9),
        ("2E+9", 2 * 10**9),
        ("1e3kB", 10**6),
        ("1_000_000", 10**6),
        (".5TB", 5 * 10**11),
        ("0.1MB", 100_000),  # exact: 0.1 is no binary float
        ("7B", 7),
        ("1.2GiB", 1_288_490_188),  # and 0.8
    ],
)
def test_sizes_as_people_write_them(written: int | float | str, nbytes: int) -> None:
    assert parse_size(written) == nbytes


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("-1", "negative"),
        (-5, "negative"),
        ("-2GiB", "negative"),
        ("0.3KiB", "whole number of bytes"),
        (1.5, "whole number of bytes"),
        ("999.9999kB", "whole number of bytes"),
        (1_500_000.5, "whole number of bytes"),
        ("64M", 'not a unit of size; write "64MiB"'),
        ("64 Mi", "not a unit of size"),
        ("ten", "not a size"),
        ("", "not a size"),
        ("MiB", "not a size"),
        ("1 2", "not a size"),
        ("0x10", "not a size"),
        ("1e400", "more than"),
        (2**63, "more than"),
        (float("nan"), "not a size"),
        (float("inf"), "not a size"),
        (True, "not a size"),
        (None, "not a size"),
        ([1], "not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(written: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_size(written)  # type: ignore[arg-type]


@given(st.integers(0, 2**63 - 1))
def test_formatting_is_the_inverse_of_parsing(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ValueError as error:
        assert repr(text) in str(error)
