"""Calls that all ranks make together: a rank that makes another one is named on all ranks, and none returns a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank.call_cases import CALLS, call
from support.ranks import Group

ALIKE = [(name, name) for name in CALLS if "another" not in name]
DIFFERENT = [
    *((name, "train") for name, _ in ALIKE if name not in ("train", "nothing") and "gradient" not in name),
    ("train", "save"),
    ("read", "read another"),
    ("read", "read a neighbour"),
    ("read", "set"),
    ("set", "set a moment"),
    ("read a moment", "state dict"),
    ("save", "read"),
    ("save", "weights"),
    ("save", "load"),
    ("set", "set another"),
    ("set a gradient", "read a gradient"),
    ("read a gradient", "read"),
    ("gather", "gather another"),
    ("gather", "gather all"),
    ("gather", "read"),
    ("edit", "gather"),
    ("edit", "edit another"),
    ("edit", "edit as rank 1"),
    ("discard", "edit"),
    ("optimizer", "load optimizer"),
    ("optimizer", "state dict"),
    ("load with", "read a moment"),
    ("load with", "save"),
]


@pytest.mark.parametrize("calls", ALIKE, ids=[name for name, _ in ALIKE])
def test_equal_calls(pair: Group, calls: tuple[str, str], tmp_path: Path) -> None:
    assert pair.run(call, folder=str(tmp_path), calls=calls) == [{"raised": ""}] * 2


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
        ("edit", "edit another"),
        ("edit", "edit as rank 1"),
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
        ("weights", "save_16bit_model()"),
        ("read", "get_full_fp32_param()"),
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
