"""torch's state dict of the optimizer is whole on each rank, and each rank loads its shard of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import state_dict_cases as cases
from multirank.test_ranks import mean
from support.ranks import Group


@pytest.mark.parametrize("client", [False, True], ids=["state dict", "optimizer"])
@pytest.mark.parametrize(
    ("stage", "tiers", "update"),
    [
        (0, {"param": "none", "optim": "cpu"}, "auto"),
        (2, {"param": "none", "optim": "nvme"}, "next_forward"),
        (3, {"param": "nvme", "optim": "nvme"}, "auto"),
    ],
)
def test_from_torch(pair: Group, stage: int, tiers: dict[str, str], update: str, client: bool, tmp_path: Path) -> None:
    """Two ranks that load torch's AdamW, or are given it, train on as it does on the samples of both."""
    check_from_torch(pair, tmp_path, stage=stage, update=update, client=client, **tiers)


@pytest.mark.parametrize(("stage", "tier"), [(1, "cpu"), (3, "nvme")])
def test_from_ademamix(pair: Group, stage: int, tier: str, tmp_path: Path) -> None:
    """A rule with three moments, whose warm-ups go on at the loaded step."""
    check_from_torch(pair, tmp_path, ademamix=True, stage=stage, param="none" if stage < 3 else tier, optim=tier)


def check_from_torch(pair: Group, folder: Path, *, ademamix: bool = False, **options: Any) -> None:
    counts: dict[str, Any] = {"steps": 3, "later": 3}
    given = cases.plainly(**counts, samples=2 * cases.SAMPLES, ademamix=ademamix)
    found = pair.run(cases.from_torch, given=given, folder=str(folder), ademamix=ademamix, **counts, **options)
    assert mean(found) == pytest.approx(given["losses"], rel=1e-6)
    for outcome in found:
        for name, value in given["values"].items():
            torch.testing.assert_close(outcome["values"][name], value, rtol=1e-5, atol=1e-6)
        for when, expected, close in (("at first", "state", 0.0), ("later state", "later state", 1e-4)):
            state = outcome[when]["state"]
            assert list(state) == list(given[expected]["state"])
            for number, each in given[expected]["state"].items():
                for name, value in each.items():
                    torch.testing.assert_close(state[number][name], value, rtol=close, atol=close * 1e-3)


def test_ranks_that_differ(pair: Group, tmp_path: Path) -> None:
    """Differing dicts are refused on all ranks before anything is changed; training goes on."""
    given = cases.plainly(1, 1, cases.SAMPLES)
    first, second = pair.run(cases.differing, given=given, folder=str(tmp_path))
    assert first["unchanged"] and second["unchanged"]
    assert first["losses"] == second["losses"]
    for name in ("states", "groups"):
        assert first["said"][name] == second["said"][name]
        assert first["said"][name].startswith("RanksError: ranks load different optimizer state dicts")
    assert first["said"]["amsgrad"].startswith("RanksError: another rank rejected the optimizer's state dict")
    assert second["said"]["amsgrad"].startswith("ConfigError: group 0 of the state dict has amsgrad=True")


def test_a_model_that_ranks_divide(four: Group, tmp_path: Path) -> None:
    """States of DTensors are gathered for a state dict on every rank, and sharded again by a load."""
    for found in four.run(cases.of_a_mesh, folder=str(tmp_path)):
        assert len(found["state"]) == len(found["names"])
        for number, name in enumerate(found["names"]):
            for moment in ("exp_avg", "exp_avg_sq"):
                value = found["values"][f"{name}/{moment}"]
                assert value.any() and torch.equal(found["state"][number][moment], value)
                assert torch.equal(found["again"][f"{name}/{moment}"], value)
