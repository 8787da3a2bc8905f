"""A frozen base in a code on two ranks: the bits of the rounded model, edits and errors that all ranks see."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.plan.frozen import FrozenFormat
from multirank import frozen_cases as cases
from multirank.test_ranks import assert_bits
from support.ranks import Group


@pytest.mark.parametrize(
    ("format", "param", "stage", "late"),
    [("8bit", "nvme", 3, False), ("nf4", "cpu", 3, True), ("nf4", "nvme", 3, True), ("8bit", "none", 1, False)],
)
def test_the_result_is_that_of_the_rounded_model(
    pair: Group, format: FrozenFormat, param: str, stage: int, late: bool, tmp_path: Path
) -> None:
    """Shards are cut at groups, so the values are those of one rank."""
    common = {"ranks": 2, "folder": str(tmp_path), "late": late, "format": format, "stage": stage}
    expected = pair.run(cases.trained, rounded=True, param="none", optim="none", **common)
    found = pair.run(cases.trained, rounded=False, param=param, optim=param, **common)
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert_bits(one, other)


def test_an_edit_that_would_be_rounded_is_refused_on_all_ranks(pair: Group, tmp_path: Path) -> None:
    for outcome in pair.run(cases.edited, folder=str(tmp_path), format="nf4"):
        assert outcome["kept"]
        assert f"{cases.BASE} is frozen and was edited to" in outcome["error"]


def test_a_value_that_is_not_finite_is_an_error_of_all_ranks(pair: Group, tmp_path: Path) -> None:
    one, other = pair.run(cases.refused, folder=str(tmp_path), format="8bit")
    assert one and "blocks.2.down.base.weight is frozen and has the value nan" in other


@pytest.mark.parametrize(("format", "other"), [("nf4", "8bit"), ("8bit", "as_is"), ("nf4", "nf4")])
def test_a_checkpoint_has_the_decoded_values(pair: Group, format: str, other: str, tmp_path: Path) -> None:
    for same in pair.run(cases.resumed, folder=str(tmp_path), format=format, other=other):
        assert all(same)
