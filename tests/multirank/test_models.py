"""Autocast, checkpointing, experts, parameters that one rank does not use, and buffers: two ranks train as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import model_cases
from multirank.test_ranks import assert_bits, mean
from support.cover import pairwise_cover
from support.ranks import Group

STAGES = [0, 1, 2, 3]
SCHEDULES: list[dict[str, Any]] = [{}, {"clip": 0.3}, {"bf16": True}]


def as_one_rank(pair: Group, model: str, stage: int, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """Bit for bit: both sum the gradients of two micro-batches."""
    places = {} if stage == 3 else {"param": "none", "optim": "cpu"}
    common: dict[str, Any] = {"model": model, "folder": str(tmp_path), "prefetch_bytes": 0, **options}
    found = pair.run(model_cases.modelled, ranks=2, stage=stage, **places, **common)
    alone = model_cases.modelled(0, ranks=1, **common)
    assert mean(found) == alone["losses"]
    assert len(set(alone["losses"])) == len(alone["losses"])
    for outcome in found:
        assert_bits(outcome, alone)
        assert outcome["steps"] == alone["steps"]
    return found


@pytest.mark.parametrize("schedule", [{}, {"clip": 0.3}, {"update": "next_forward"}], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_share_a_version(pair: Group, stage: int, schedule: dict[str, Any], tmp_path: Path) -> None:
    """The update of a slice during backward is no edit of the other slices, which backward still needs."""
    as_one_rank(pair, "in one tensor", stage, tmp_path, **schedule)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("around", ["forward", "loop"])
def test_autocast(pair: Group, around: str, stage: int, tmp_path: Path) -> None:
    """Casts of parameters are neither kept from step to step nor in memory beyond their use."""
    casts = as_one_rank(pair, "plain", stage, tmp_path, autocast=around)
    uncast = model_cases.modelled(0, ranks=1, model="plain", folder=str(tmp_path))
    assert casts[0]["losses"] != uncast["losses"]


def test_autocast_of_the_config(pair: Group, tmp_path: Path) -> None:
    """Two ranks give the bits of one, and those of a context around the forward."""
    found = as_one_rank(pair, "non-reentrant", 3, tmp_path, autocast="config", steps=2)
    by_hand = model_cases.modelled(
        0, ranks=1, model="non-reentrant", folder=str(tmp_path), prefetch_bytes=0, autocast="forward", steps=2
    )
    assert_bits(found[0], by_hand)


@pytest.mark.parametrize(("around", "model"), [("forward", "reentrant"), ("loop", "non-reentrant")])
def test_autocast_and_checkpointing(pair: Group, around: str, model: str, tmp_path: Path) -> None:
    as_one_rank(pair, model, 3, tmp_path, autocast=around)


CHECKPOINTED = [name for name in model_cases.MODELS if "reentrant" in name]


def combinations() -> list[Any]:
    every = [(model, stage, number) for model in CHECKPOINTED for stage in STAGES for number in range(len(SCHEDULES))]
    cover = pairwise_cover(every)
    return [pytest.param(*case, marks=[] if case in cover else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(("model", "stage", "schedule"), combinations())
def test_checkpointing(pair: Group, model: str, stage: int, schedule: int, tmp_path: Path) -> None:
    """Blocks that are recomputed, twice in a row too, and experts of which ranks recompute different ones."""
    found = as_one_rank(pair, model, stage, tmp_path, **SCHEDULES[schedule])
    if "experts" in model:
        assert len(set(found[0]["steps"].values())) > 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("schedule", [0, 1])
def test_parameters_that_one_rank_never_uses(pair: Group, schedule: int, stage: int, tmp_path: Path) -> None:
    """They are updated on both, with the gradient of the other; those that no rank uses stay as they were."""
    found = as_one_rank(pair, "one-sided", stage, tmp_path, **SCHEDULES[schedule])
    for outcome in found:
        assert outcome["steps"]["blocks.1.side"] == 3
        assert outcome["steps"]["blocks.1.unused"] == 0
        assert outcome["values"]["blocks.1.unused"].eq(1).all()
        assert not outcome["values"]["blocks.1.side"].eq(1).any()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers(pair: Group, stage: int, tmp_path: Path) -> None:
    """Ranks begin with those of the first, and keep their own; a checkpoint has those of the first."""
    one, two = pair.run(model_cases.normed, folder=str(tmp_path), directory=str(tmp_path / "saved"), stage=stage)
    saved = [name for name in one["own"] if name != "unsaved"]
    for name, value in one["own"].items():
        assert torch.equal(one["start"][name], value) and torch.equal(two["start"][name], value)
        changing = "running" in name
        assert torch.equal(one["trained"][name], two["trained"][name]) != changing, name
    assert not torch.equal(one["own"]["noise"], two["own"]["noise"])
    for name in saved:
        assert torch.equal(one["loaded"][name], one["trained"][name])
        assert torch.equal(two["loaded"][name], one["trained"][name])
    assert_bits(one, two)
