"""A rank ends in mid-training: the others raise at once, stop, and leave no files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from multirank import odd_cases
from support.cover import pairwise_cover
from support.ranks import Group

WHERE = ["forward", "backward", "step"]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Group]:
    """Two ranks of their own, of which one ends in every test."""
    group = Group(2)
    yield group
    group.stop()


def check(said: dict[str, str], folder: Path) -> None:
    assert said["raised"].startswith("RanksError: a collective failed (")
    assert "Another rank probably ended, closed its engine, or did not answer" in said["raised"]
    assert "a collective failed" in said["stopped"]
    assert os.listdir(folder) == []


CASES = [(where, how, stage) for where in WHERE for how in ("killed", "exits") for stage in (3, 0)]


@pytest.mark.parametrize(
    ("where", "how", "stage"),
    [pytest.param(*case, marks=[] if case in pairwise_cover(CASES)[:2] else [pytest.mark.slow]) for case in CASES],
)
def test_a_rank_whose_process_ends(mortal: Group, where: str, how: str, stage: int, tmp_path: Path) -> None:
    """By the connection that closes, and not by the 60 s of the process group."""
    one, two = mortal.run(
        odd_cases.left_alone, timeout=50, dies=1, folder=str(tmp_path), where=where, how=how, stage=stage
    )
    assert two is None
    check(one, tmp_path)


@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_closes_its_engine(pair: Group, where: str, stage: int, tmp_path: Path) -> None:
    """After an error of its user's own, while its process lives on; the next engine works."""
    one, two = pair.run(odd_cases.left_alone, timeout=50, folder=str(tmp_path), where=where, how="raises", stage=stage)
    assert two["raised"] == "ValueError: the user's own"
    check(one, tmp_path)
    assert pair.run(odd_cases.odd, folder=str(tmp_path), which=1) == [{}, {}]
