"""All ranks issue the same collectives in the same order, whatever the data, the timing and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import cases, odd_cases
from support.ranks import Group


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
def test_a_path_that_data_decides(pair: Group, update: str, late: bool, tmp_path: Path) -> None:
    """Blocks left out, used twice, in another order: as one rank does it, bit for bit."""
    both = pair.run(cases.branching, ranks=2, folder=str(tmp_path), update=update, late=late)
    alone = cases.branching(0, ranks=1, folder=str(tmp_path), update="after_backward")
    assert [sum(pair) / 2 for pair in zip(both[0]["losses"], both[1]["losses"], strict=True)] == alone["losses"]
    for name, value in alone["values"].items():
        assert torch.equal(both[0]["values"][name], value), name


@pytest.mark.parametrize(("prefetch", "clip"), [(0, 0.3), ("1GiB", 0.0)])
def test_ranks_of_unequal_pace(pair: Group, prefetch: Any, clip: float, tmp_path: Path) -> None:
    """One rank computes in fits and starts, the other's copies are late: nothing depends on who is first."""
    options: dict[str, Any] = {"folder": str(tmp_path), "steps": 4, "prefetch_bytes": prefetch, "clip": clip}
    first = pair.run(cases.unequal_pace, **options)
    assert pair.run(cases.unequal_pace, **options) == first


@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_loss_on_one_rank_is_raised_on_all(pair: Group, where: int, tmp_path: Path) -> None:
    """Before anything is changed; training can go on with the next batch."""
    for outcome in pair.run(cases.bad_loss, folder=str(tmp_path), where=where):
        assert outcome["raised"].startswith("2: the loss is ")
        assert "on 1 of 2 ranks" in outcome["raised"]
        assert len(outcome["losses"]) == outcome["steps"] == 4


def test_a_loss_that_is_checked_in_backward_is_raised_on_all(pair: Group, tmp_path: Path) -> None:
    """With the results of a check before backward; a kept view shows the parameters, and edits through it count."""
    options: dict[str, Any] = {"folder": str(tmp_path), "where": 1, "viewed": True}
    before = pair.run(cases.bad_loss, **options)
    assert pair.run(cases.bad_loss, **options, later=True) == before


@pytest.mark.parametrize(("update", "clip"), [("next_forward", 0.3), ("next_forward", 0.0), ("after_backward", 0.0)])
def test_a_bad_gradient_on_one_rank_is_raised_on_all(pair: Group, update: str, clip: float, tmp_path: Path) -> None:
    """In its own step, before anything is updated."""
    for outcome in pair.run(cases.bad_gradient, folder=str(tmp_path), where=1, update=update, clip=clip):
        assert outcome["raised"].startswith("2: the gradient norm is nan")
        assert outcome["finite"]
        assert not outcome["stopped"]


def test_a_bad_gradient_during_backward_is_raised_on_all(pair: Group, tmp_path: Path) -> None:
    """Other units may have been updated by then: the units it belongs to keep their values, and the engine stops."""
    one, other = pair.run(cases.bad_gradient, folder=str(tmp_path), where=1, update="during_backward", clip=0.0)
    assert one["raised"][:2] == other["raised"][:2] != ""
    for outcome in (one, other):
        assert "a gradient was NaN or infinite" in outcome["raised"]
        assert "Load the last checkpoint" in outcome["raised"]
        assert outcome["finite"]
        assert outcome["stopped"]


@pytest.mark.parametrize(
    ("options"),
    [
        {},
        {"bf16": True, "update": "next_forward", "moments": "8bit", "prefetch_bytes": 0},
        {"stage": 2, "param": "none", "optim": "cpu", "clip": 0.3},
        {"stage": 0, "param": "none"},
    ],
    ids=str,
)
def test_experts_that_some_ranks_use(pair: Group, options: dict[str, Any], tmp_path: Path) -> None:
    """As one rank that accumulates, bit for bit: an expert is updated on all ranks if any has a gradient for it."""
    common: dict[str, Any] = {"folder": str(tmp_path), "steps": 5}
    one, other = pair.run(cases.routed, ranks=2, **common, **options)
    assert any((a == 0) != (b == 0) for a, b in zip(one["used"], other["used"], strict=True))
    assert one["steps"] == other["steps"] and len(set(one["steps"].values())) > 1
    alone = cases.routed(0, ranks=1, **common, **{**options, "stage": 3})
    assert [sum(two) / 2 for two in zip(one["losses"], other["losses"], strict=True)] == alone["losses"]
    assert one["steps"] == alone["steps"]
    for outcome in (one, other):
        for name, value in alone["values"].items():
            assert torch.equal(outcome["values"][name], value), name


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "paths", [[[0, 1, 2, 3, 4], [0, 1, 3, 2, 4]], [[0, 1, 2], [0, 1]], [[0], [4]]], ids=["order", "fewer", "other"]
)
def test_ranks_that_go_apart_are_told(
    pair: Group, paths: list[list[int]], stage: int, clip: float, tmp_path: Path
) -> None:
    """Both, at once, with the units; and neither hangs, exchanges what does not belong together, or goes on."""
    one, other = pair.run(cases.apart, folder=str(tmp_path), stage=stage, paths=paths, clip=clip)
    assert one["raised"] == other["raised"]
    assert one["raised"].startswith("the ranks issued different collectives: rank 0 ") and "; rank 1 " in one["raised"]
    assert "unit body.blocks." in one["raised"]
    for outcome in (one, other):
        assert outcome["stopped"].startswith("the engine stopped (the ranks issued different collectives")
        assert outcome["seconds"] < 30


def test_an_engine_that_cannot_be_made(pair: Group, tmp_path: Path) -> None:
    """The same error on all ranks, and the next engine works."""
    for errors in pair.run(cases.refused, folder=str(tmp_path)):
        assert len(errors) == 2
        assert all(error.startswith("StorageError") and "does not exist" in error for error in errors)


def test_each_rank_gets_its_random_numbers_back_and_all_hear_of_damage(pair: Group, tmp_path: Path) -> None:
    one, two = pair.run(cases.interrupted, folder=str(tmp_path), directory=str(tmp_path / "saved"))
    assert one["drawn"][0] == one["drawn"][1] != two["drawn"][0] == two["drawn"][1]
    assert sorted("another rank" in outcome["said"] for outcome in (one, two)) == [False, True]
    assert all("Use another checkpoint" in outcome["said"] for outcome in (one, two))


def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_two(pair: Group, single: Group, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "directory": str(tmp_path / "saved")}
    saved = pair.run(cases.save, steps=3, **options)
    for group in (pair, single):
        for loaded in group.run(cases.load, **options):
            for name, value in saved[0].items():
                assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize(("stage", "what"), [(0, "parameter"), (2, "state_dict"), (3, "save")])
def test_a_rank_that_looks_at_states_alone(pair: Group, stage: int, what: str, tmp_path: Path) -> None:
    """Sums of one rank are not confused with another collective of the other rank."""
    for said in pair.run(odd_cases.is_single, folder=str(tmp_path), stage=stage, what=what):
        did = {"parameter": "get_full_fp32_param()", "save": "save_checkpoint()", "state_dict": "state_dict()"}[what]
        assert f"rank 0 calls {did}" in said and f"Call {did} on all ranks" in said
