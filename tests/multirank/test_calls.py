"""Calls that all ranks make together: a rank that makes another one is named on all ranks, and none returns a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank.call_cases import CALLS, all_calls, call
from support.ranks import Group

DIFFERENT = [
    ("train", "save"),
    ("load", "train"),
    ("read", "read another"),
    ("read", "read a neighbour"),
    ("read a moment", "set a moment"),
    ("set", "set another"),
    ("set a gradient", "read a gradient"),
    ("gather", "gather another"),
    ("gather", "gather all"),
    ("edit", "edit another"),
    ("edit", "edit as rank 1"),
    ("discard", "edit"),
    ("optimizer", "load optimizer"),
    ("load with", "weights"),
    ("state dict", "read"),
]
"""Every call, and every argument that is compared."""


def test_equal_calls(pair: Group, tmp_path: Path) -> None:
    """One after the other, with steps between them."""
    assert pair.run(all_calls, folder=str(tmp_path)) == [[name for name in CALLS if "another" not in name]] * 2


@pytest.mark.parametrize("calls", DIFFERENT, ids=["-".join(calls) for calls in DIFFERENT])
def test_different_calls(pair: Group, calls: tuple[str, str], tmp_path: Path) -> None:
    one, other = pair.run(call, folder=str(tmp_path), calls=calls)
    assert one["raised"] == other["raised"]
    assert one["raised"].startswith("the ranks issued different collectives: rank 0 ") and "; rank 1 " in one["raised"]
    assert " Call " in one["raised"] and "() on all ranks, with the same arguments" in one["raised"]


@pytest.mark.parametrize(
    "calls",
    [
        ("read", "read another"),
        ("set", "set another"),
        ("edit", "gather"),
        ("edit another", "edit as rank 1"),
        ("optimizer", "state dict"),
        ("weights", "read"),
    ],
    ids="-".join,
)
def test_different_calls_where_states_are_not_sharded(pair: Group, calls: tuple[str, str], tmp_path: Path) -> None:
    one, other = pair.run(call, folder=str(tmp_path), calls=calls, stage=2)
    assert one["raised"] == other["raised"]
    assert "() on all ranks, with the same arguments" in one["raised"]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("save", "save_checkpoint()"),
        ("edit", "GatheredParameters()"),
    ],
)
def test_a_call_that_another_rank_does_not_make_before_it_ends(
    pair: Group, does: str, said: str, tmp_path: Path
) -> None:
    alone, ended = pair.run(call, folder=str(tmp_path), calls=(does, "nothing"))
    assert ended == {"raised": ""}
    assert f"closed its engine, or ended, while this rank waits in {said}. Call {said} on all ranks" in alone["raised"]


def test_a_call_of_one_rank_is_named(pair: Group, tmp_path: Path) -> None:
    texts = pair.run(call, folder=str(tmp_path), calls=("save", "read a moment"))
    said = (
        "rank 0 calls save_checkpoint(); rank 1 calls get_full_optimizer_state() for exp_avg of blocks.0.up.weight in "
        "unit blocks.0.up. Call save_checkpoint() and get_full_optimizer_state() on all ranks"
    )
    assert all(said in each["raised"] for each in texts)
