"""Calls that all ranks make together: a rank that makes another one is named on all ranks, and none returns a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank.call_cases import CALLS, call
from support.ranks import Group

ALIKE = [(name, name) for name in CALLS]
DIFFERENT = [
    *((name, "train") for name in CALLS if name not in ("train", "nothing")),
    ("train", "save"),
    ("read", "read another"),
    ("read", "read a neighbour"),
    ("read", "set"),
    ("set", "set a moment"),
    ("read a moment", "state dict"),
    ("save", "read"),
    ("save", "weights"),
    ("save", "load"),
]


@pytest.mark.parametrize("calls", ALIKE, ids=[name for name, _ in ALIKE])
def test_equal_calls(pair: Group, calls: tuple[str, str], tmp_path: Path) -> None:
    assert pair.run(call, folder=str(tmp_path), calls=calls) == [{"raised": ""}] * 2


@pytest.mark.parametrize("calls", DIFFERENT, ids=["-".join(calls) for calls in DIFFERENT])
def test_different_calls(pair: Group, calls: tuple[str, str], tmp_path: Path) -> None:
    one, other = pair.run(call, folder=str(tmp_path), calls=calls)
    assert one["raised"] == other["raised"]
    assert one["raised"].startswith("the ranks issued different collectives: rank 0 ") and "; rank 1 " in one["raised"]
    assert "make that call on all ranks" in one["raised"]


@pytest.mark.parametrize("does", ["save", "read"])
def test_a_call_that_another_rank_does_not_make_before_it_ends(pair: Group, does: str, tmp_path: Path) -> None:
    alone, ended = pair.run(call, folder=str(tmp_path), calls=(does, "nothing"))
    assert "closed its engine, or ended" in alone["raised"] and ended == {"raised": ""}
    said = {"save": "saves a checkpoint", "read": "reads master of parameter 1 in unit blocks.0.up"}[does]
    assert alone["raised"].endswith(f"This rank {said}, a call that all ranks must make.")


def test_a_call_of_one_rank_is_named(pair: Group, tmp_path: Path) -> None:
    texts = pair.run(call, folder=str(tmp_path), calls=("save", "read a moment"))
    assert all("rank 0 saves a checkpoint; rank 1 reads exp_avg of parameter " in each["raised"] for each in texts)
    assert all("in unit blocks.0" in each["raised"] for each in texts)
