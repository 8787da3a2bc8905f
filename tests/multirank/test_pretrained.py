"""`load_pretrained` on several ranks: each reads its shards from the files, and all agree on what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multirank import cases
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded
from support.ranks import Group
from support.states import states_of


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_every_rank_reads_its_shards(pair: Group, tmp_path: Path, stage: int, bf16: bool) -> None:
    """The values that one rank would start with, from half of the elements where they are sharded."""
    model = seeded(lambda: Stack(tied=True))
    numel = sum(parameter.numel() for parameter in model.parameters())
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    with open_engine(model, engine_config(bf16=bf16)) as engine:
        expected = states_of(engine) | engine.state_dict()
    place = {"folder": str(tmp_path), "directory": str(tmp_path), "loading": [True, True]}
    found = pair.run(cases.pretrained, **place, stage=stage, bf16=bf16, param="none", optim="none")
    for outcome in found:
        assert outcome["values"].keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in outcome["values"].items())
    read = [outcome["read"] for outcome in found]
    assert read == [numel, numel] if stage == 0 else sum(read) == numel and max(read) < numel


def test_ranks_that_load_different_things_are_told(pair: Group, tmp_path: Path) -> None:
    state = dict(Stack(tied=True).named_parameters())
    save_file({name: p.detach().clone() for name, p in state.items()}, tmp_path / "model.safetensors")
    place = {"folder": str(tmp_path), "directory": str(tmp_path)}
    found = pair.run(cases.pretrained, **place, loading=[True, False])
    assert ["alike on every rank" in outcome["error"] for outcome in found] == [True, True]
