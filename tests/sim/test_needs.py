"""Advice names changes that free what is missing."""

from __future__ import annotations

import pytest

from infinity.sim.needs import enough

CHANGES = [(10, "states"), (70, "activations"), (5, "buffers")]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (10, ["states"]),
        (11, ["activations"]),
        (71, ["activations", "states"]),
        (85, ["activations", "states", "buffers"]),
        (900, ["activations", "states", "buffers"]),
    ],
)
def test_the_first_change_that_freesenough_is_named_else_the_largest_together(
    missing: int, expected: list[str]
) -> None:
    assert enough(CHANGES, missing) == expected


def test_something_is_named_if_nothing_frees_a_byte() -> None:
    assert enough([(0, "states"), (0, "buffers")], 1) == ["buffers"]
