"""`infinity.stream_weights` on two ranks: equal values, and an error instead of a hang where ranks differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import stream_cases
from support.configs import DEVICES
from support.ranks import Group


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("param", DEVICES)
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_ranks_stream_the_same_weights(
    pair: Group, bf16: bool, update: str, param: str, stage: int, late: bool, tmp_path: Path
) -> None:
    """Streams after each step change no loss."""
    if stage < 3:
        param = "none"
    options = {"param": param, "bf16": bf16, "update": update, "stage": stage}
    one, other = pair.run(stream_cases.streaming, folder=str(tmp_path), late=late, inference=not bf16, **options)
    for seen in (one, other):
        assert seen["losses"] == seen["expected"] and seen["equal"]
    assert one["state"].keys() == other["state"].keys()
    assert all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())


@pytest.mark.parametrize("how", ["break", "raise", "abandon"])
@pytest.mark.parametrize("at", [(1, 1), (5, 5), (32, 32), (3, 9), (9, 3)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_stops_leaves_the_engine_usable(
    pair: Group, how: str, at: tuple[int, int], stage: int, tmp_path: Path
) -> None:
    """In stages 1 to 3 the rank that asks for more raises RanksError; in stage 0 each rank reads its own weights."""
    options: dict[str, Any] = {"param": "none" if stage < 3 else "cpu", "stage": stage}
    found = pair.run(stream_cases.stopping, folder=str(tmp_path), how=how, at=at, **options)
    expected = pair.run(stream_cases.stopping, folder=str(tmp_path), how="break", at=(1, 1), **options)
    for rank, (seen, plain) in enumerate(zip(found, expected, strict=True)):
        first = at[rank] <= at[1 - rank] or stage < 3
        if first:
            assert seen["count"] == at[rank]
            assert seen["raised"] == ("ValueError: no room" if how == "raise" else "")
        else:
            assert seen["raised"].startswith(f"RanksError: rank {1 - rank} stopped reading stream_weights() before ")
        assert seen["losses"] == plain["losses"]
        assert all(torch.equal(value, plain["values"][name]) for name, value in seen["values"].items())
        assert len(seen["values"]) == len(plain["values"]) == 32


@pytest.mark.parametrize("stage", [0, 3])
def test_arguments_that_differ_raise_on_all_ranks(pair: Group, stage: int, tmp_path: Path) -> None:
    param = "none" if stage < 3 else "cpu"
    for rank, seen in enumerate(pair.run(stream_cases.differing, folder=str(tmp_path), param=param, stage=stage)):
        names, dtype, wrong, all_wrong = seen["raised"]
        start = f"RanksError: rank {1 - rank} called stream_weights(), and its arguments "
        assert names.startswith(f"{start}differ") and dtype.startswith(f"{start}differ")
        assert wrong.startswith("UsageError: the model has no weights named wrong" if rank else f"{start}raised")
        assert all_wrong.startswith("UsageError: the model has no weights named wrong")
        assert seen["count"] == 32


def test_a_rank_that_streams_alone_is_named(pair: Group, tmp_path: Path) -> None:
    for text in pair.run(stream_cases.calling, folder=str(tmp_path)):
        assert "rank 0 calls stream_weights()" in text and "rank 1 calls state_dict()" in text
    pair.stop()  # the ranks' collectives are out of step
