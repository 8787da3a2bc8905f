"""Engines without an optimizer on two ranks: checkpoints of a reference model, and DeepSpeed's names of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multirank import reference_cases
from support.models import Stack, seeded
from support.ranks import Group


@pytest.mark.parametrize("stage", [0, 3])
def test_a_reference_model_is_saved_and_loaded(pair: Group, stage: int, tmp_path: Path) -> None:
    """Each rank has the whole model's values, and in stage 3 half of each parameter."""
    model = seeded(Stack, seed=1)
    for seen in pair.run(reference_cases.saved, stage=stage, folder=str(tmp_path)):
        assert seen["batch"] == (4, 2, 1)
        assert seen["path"] == str(tmp_path / "global_step0") and seen["client_state"] == {"epoch": 3}
        assert all(torch.equal(seen["states"][name], value) for name, value in model.state_dict().items())
        if stage == 3:
            assert seen["available"] == [False, True] and seen["group"] == 2
            assert torch.equal(seen["whole"], model.head.weight)
            halves = [-(-p.numel() // 2) for p in model.parameters()]
            sizes = zip(model.parameters(), halves, strict=True)
            assert seen["sizes"] == [(p.numel(), half, half) for p, half in sizes]


def test_an_open_engines_model_becomes_a_plain_one(pair: Group, tmp_path: Path) -> None:
    """The last line of many scripts, on every rank: shards on nvme, and a shared head under both names."""
    for seen in pair.run(reference_cases.made_plain, folder=str(tmp_path)):
        assert seen["model"].keys() == seen["values"].keys() >= {"head.weight", "embedding.weight"}
        assert all(torch.equal(seen["model"][name], value) for name, value in seen["values"].items())
