"""Whole models in `GatheredParameters` on two ranks: gathered, edited and refused together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import gather_cases
from support.ranks import Group


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize(
    "options",
    [{"update": "during_backward"}, {"update": "next_forward"}, {"param": "cpu", "bf16": True}],
    ids=["during_backward", "next_forward", "bf16"],
)
def test_a_gathered_model_trains_and_takes_edits_as_its_parts_do(
    pair: Group, options: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    """Updates leave buffers to views, of which the gathered model has as many as units."""
    options = {"folder": str(tmp_path), "late": late, **options}
    found, plain = (pair.run(gather_cases.whole, **options, gathers=gathers) for gathers in (True, False))
    for seen, expected in zip(found, plain, strict=True):
        assert seen["losses"] == expected["losses"] and seen["added"] == expected["added"] == 0
        for name, value in expected["values"].items():
            assert torch.equal(seen["values"][name], value), name


def test_a_rank_without_memory_refuses_on_all(pair: Group, tmp_path: Path) -> None:
    """All ranks name the same bytes, and continue."""
    one, other = pair.run(gather_cases.too_large, folder=str(tmp_path))
    assert one == other
    assert "too little host memory" in one["raised"] and " 0 are available" in one["raised"]


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"param": "none", "optim": "none"}, {"param": "none", "stage": 2}], ids=str
)
def test_an_exception_on_all_ranks_keeps_the_modifiers_edits(
    pair: Group, options: dict[str, Any], tmp_path: Path
) -> None:
    """Scripts may catch it: ranks must not go on with different parameters."""
    folder = str(tmp_path)
    expected, other = pair.run(gather_cases.raising, folder=folder, raises=False, **options)
    for seen in (other, *pair.run(gather_cases.raising, folder=folder, raises=True, **options)):
        assert all(torch.equal(seen[name], value) for name, value in expected.items())


def test_an_exception_on_one_rank_is_the_one_that_is_raised(pair: Group, tmp_path: Path) -> None:
    other, raised = pair.run(gather_cases.raising_alone, folder=str(tmp_path))
    assert raised == ("ValueError", "no such file")
    assert other[0] == "RanksError"
    pair.stop()  # the ranks' collectives are out of step


def test_the_outer_block_decides_on_edits(pair: Group, tmp_path: Path) -> None:
    """A block of `infinity.deepspeed` in it, without modifier_rank, mixes no shards of ranks with and without edits."""
    for values in pair.run(gather_cases.within, folder=str(tmp_path)):
        assert all((value == 3).all() for value in values.values())
