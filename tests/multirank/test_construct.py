"""`infinity.Init` on several ranks: every rank builds its own model, and all train rank 0's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multirank import cases
from support.configs import engine_config
from support.loops import open_engine
from support.models import Stack, seeded
from support.ranks import Group
from support.states import states_of


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_ranks_take_the_values_of_the_first(pair: Group, tmp_path: Path, stage: int, bf16: bool) -> None:
    with open_engine(seeded(lambda: Stack(depth=4, tied=True), 0), engine_config(folder=tmp_path, bf16=bf16)) as engine:
        expected = states_of(engine) | engine.state_dict()
    found = pair.run(cases.constructed, folder=str(tmp_path), stage=stage, bf16=bf16)
    for outcome in found:
        assert outcome["kept"] > 0.5
        assert outcome["values"].keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in outcome["values"].items())
        assert all(loss > 0 for loss in outcome["losses"])
