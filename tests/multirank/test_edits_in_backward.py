"""Hooks that edit parameters in backward are refused on several ranks, each of which has gradients of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import edit_cases as cases
from support.ranks import Group

OPTIONS = [
    {},
    {"stage": 0, "param": "none", "optim": "none", "cache_bytes": 1 << 30},
    {"stage": 1, "param": "none", "optim": "none", "update": "next_forward"},
    {"bf16": True, "update": "next_forward", "prefetch_bytes": 0},
]
SCHEDULES = pytest.mark.parametrize("options", OPTIONS, ids=["stage 3", "stage 0", "stage 1", "next forward"])


@SCHEDULES
@pytest.mark.parametrize("how", cases.BEFORE)
def test_an_edit_is_refused_before_it_happens(pair: Group, how: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The error names the parameter, nothing has changed, and the engine goes on without the step."""
    name = r"blocks\.3\.up\.bias" if how == "by_a_tensor_hook" else r"blocks\.1\.up\.bias"
    for found in pair.run(cases.edited, how=how, folder=str(tmp_path), **options):
        assert re.match(rf"parameter {name} was to be edited during backward, .*2 ranks", found["first"] or "")
        assert found["next"] is None and found["kept"]


@SCHEDULES
@pytest.mark.parametrize("how", cases.AFTER)
def test_an_edit_that_leaves_no_version_is_found(
    pair: Group, how: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The first backward with such a hook raises, and no later one runs."""
    for found in pair.run(cases.edited, how=how, folder=str(tmp_path), **options):
        assert "were edited by a hook during backward" in (found["first"] or "")
        assert "the engine stopped" in found["next"]


@SCHEDULES
@pytest.mark.parametrize("how", ["by_a_tensor_hook", "by_a_module_hook", "by_an_array", "by_a_kept_view"])
def test_hooks_registered_later(pair: Group, how: str, options: dict[str, Any], tmp_path: Path) -> None:
    for found in pair.run(cases.edited, how=how, folder=str(tmp_path), late=True, **options):
        assert "edited" in (found["first"] or "") and "during backward" in found["first"]


@SCHEDULES
def test_a_block_that_the_forward_skips(pair: Group, options: dict[str, Any], tmp_path: Path) -> None:
    """Its parameters come from an update that has not written them."""
    how = "by_data_of_an_unused_block"
    for found in pair.run(cases.edited, how=how, folder=str(tmp_path), late=True, skips=True, **options):
        assert "were edited by a hook during backward" in (found["first"] or "")


def test_a_torch_optimizer_in_a_hook(pair: Group, tmp_path: Path) -> None:
    for found in pair.run(cases.edited, how="by_a_torch_optimizer", folder=str(tmp_path)):
        assert "a separate SGD was called" in (found["first"] or "") and found["next"] is None and found["kept"]


@SCHEDULES
@pytest.mark.parametrize("skips", [False, True])
def test_hooks_that_change_gradients_train_as_one_rank(
    pair: Group, skips: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """A hook that is linear in the gradient gives the mean of what it gives on each rank.

    skips: a block has no use in the forward, so that the hook in backward is the first to see its update.
    """
    options = {"skips": skips, **options}
    ranks = pair.run(cases.read, folder=str(tmp_path), **options)
    alone = cases.read(0, folder=str(tmp_path), ranks=1, **options)
    for found in ranks:
        for name, value in alone.items():
            tolerance = 2e-2 if options.get("bf16") else 1e-5
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rule_of_the_loops_own(pair: Group, stage: int, tmp_path: Path) -> None:
    """The way that the error names: edits between backward and step, by gradients averaged over ranks."""
    places = {} if stage == 3 else {"param": "none", "optim": "none"}
    ranks = pair.run(cases.ruled, folder=str(tmp_path), stage=stage, lr=0.1, **places)
    losses, alone = cases.ruled(0, ranks=1, folder=str(tmp_path), lr=0.1)
    assert [sum(pair) / 2 for pair in zip(ranks[0][0], ranks[1][0], strict=True)] == pytest.approx(losses, rel=1e-5)
    for _, found in ranks:
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
