"""Durable runs on two ranks: all go on from the last step that all have committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import durable_cases as cases
from support.ranks import Group

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, next forward, bf16": {"clip": 0.5, "bf16": True},
    "stage 1": {"stage": 1, "param": "none"},
    "stage 3, in host memory": {"param": "cpu", "optim": "cpu", "clip": 0.5},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ranks_resume_with_the_bits_of_an_uninterrupted_run(
    pair: Group, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = pair.run(cases.uninterrupted, folder=str(tmp_path), **options)
    first = pair.run(cases.begun, folder=str(tmp_path), stop=3, **options)
    rest = pair.run(cases.gone_on, folder=str(tmp_path), **options)
    check(expected, first, rest, 3)


@pytest.mark.parametrize("stop", [3, 4])
def test_ranks_resume_the_last_step_that_all_have(pair: Group, tmp_path: Path, stop: int) -> None:
    """One rank has a record of a step more; its slots are written again, and the record is dropped before that."""
    expected = pair.run(cases.uninterrupted, folder=str(tmp_path))
    first = pair.run(cases.begun_and_left_behind, folder=str(tmp_path), stop=stop)
    rest = pair.run(cases.gone_on, folder=str(tmp_path))
    check(expected, first, rest, stop - 1)


def test_all_ranks_refuse_to_replace_a_run(pair: Group, tmp_path: Path) -> None:
    pair.run(cases.begun, folder=str(tmp_path), stop=2)
    pair.run(cases.refused_without_resume, folder=str(tmp_path))


def check(expected: list[Any], first: list[Any], rest: list[Any], step: int) -> None:
    for (losses, values), before, (went_on, after, present) in zip(expected, first, rest, strict=True):
        assert went_on == step
        assert losses == before[:step] + after
        assert all(torch.equal(values[name], present[name]) for name in values)
