"""Models on the meta device on several ranks: each makes its shards, with the values that one rank would make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multirank import meta_cases
from support.ranks import Group


def alike(found: list[dict[str, torch.Tensor]]) -> bool:
    first, *others = found
    return all(
        first.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in first.items())
        for other in others
    )


@pytest.mark.parametrize("rule", ["", "numpy"])
@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_makes_the_parameters_of_its_shards(pair: Group, tmp_path: Path, rule: str, stage: int) -> None:
    """Values are those of one rank, though the ranks have other seeds."""
    expected = meta_cases.made(0, folder=str(tmp_path), rule=rule)
    param = "nvme" if stage == 3 else "none"
    found = pair.run(meta_cases.made, folder=str(tmp_path), rule=rule, stage=stage, param=param)
    assert alike([expected["values"], *(one["values"] for one in found)])
    assert expected["made"] == expected["all"]
    # Parameters that straddle two shards are made by both ranks.
    total = sum(one["made"] for one in found)
    assert total < 1.5 * expected["all"], (total, expected["all"])


@pytest.mark.parametrize("rule", ["own generator", "by rank", "attributes"])
def test_values_are_the_first_ranks_where_modules_depend_on_more_than_a_seed(
    pair: Group, tmp_path: Path, rule: str
) -> None:
    found = pair.run(meta_cases.made, folder=str(tmp_path), rule=rule)
    assert alike([one["values"] for one in found])
    assert all(one["made"] == one["all"] for one in found)
    if rule == "by rank":
        assert all((value == 0.01).all() for name, value in found[0]["values"].items() if name.endswith("/master"))


def test_ranks_that_replicate_states_take_those_of_the_first(pair: Group, tmp_path: Path) -> None:
    expected = meta_cases.made(0, folder=str(tmp_path))
    found = pair.run(meta_cases.made, folder=str(tmp_path), stage=0, param="none")
    assert alike([expected["values"], *(one["values"] for one in found)])


@pytest.mark.parametrize("on_cpu", [0, 1])
def test_one_rank_may_build_on_the_cpu(pair: Group, tmp_path: Path, on_cpu: int) -> None:
    """The values are rank 0's, as for a model that all ranks build on the cpu."""
    expected = meta_cases.made(0, folder=str(tmp_path), on_cpu=[0] if on_cpu == 0 else [])
    found = pair.run(meta_cases.made, folder=str(tmp_path), on_cpu=[on_cpu])
    assert alike([expected["values"], *(one["values"] for one in found)])
