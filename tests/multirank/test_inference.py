"""Ranks that share a model's parameters, each with inputs of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multirank import inference_cases as cases
from support.ranks import Group

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}], ids=str
)
@pytest.mark.parametrize(("name", "param"), [("gpt2", "nvme"), ("llama", "cpu")])
def test_every_rank_generates_its_own_text(
    pair: Group, name: str, param: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Texts of different lengths, from shards: a rank that is done continues for the others."""
    for outcome in pair.run(cases.generated, folder=str(tmp_path), name=name, param=param, **how):
        assert all(text == outcome["expected"] for text in outcome["texts"])
        assert outcome["gathered"] > 0 and outcome["shards"] == {0.5}


def test_stage_3_runs_as_many_forwards_on_every_rank(pair: Group, tmp_path: Path) -> None:
    for same in pair.run(cases.forwards, folder=str(tmp_path), stage=3, counts=[3, 3]):
        assert same == [True] * 4


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_it_ranks_run_by_themselves(pair: Group, stage: int, tmp_path: Path) -> None:
    one, other = pair.run(cases.forwards, folder=str(tmp_path), stage=stage, counts=[1, 5])
    assert (one, other) == ([True] * 2, [True] * 6)
