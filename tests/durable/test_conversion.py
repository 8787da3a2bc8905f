"""A run that goes on with another number of ranks, other units, tiles or formats than those that wrote its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from durable import conversion_cases as cases
from durable.conversion_cases import assert_same
from support.ranks import Group, RankFailed


def run(groups: dict[int, Group], case: Any, ranks: int, folder: Path, **options: Any) -> Any:
    return groups[ranks].run(case, folder=str(folder), ranks=ranks, **options)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), (1, 2)])
def test_another_number_of_ranks_loads_the_committed_bits(
    groups: dict[int, Group], before: int, after: int, tmp_path: Path
) -> None:
    committed = run(groups, cases.interrupted, before, tmp_path, steps=3)[0]
    for found in run(groups, cases.resumed, after, tmp_path, until=5):
        assert_same(found["loaded"], committed)
        assert (found["start"], found["client_state"]) == (3, {"next": 3})
        assert found["generations"] == [2]
        assert len(found["losses"]) == 2
    again = run(groups, cases.resumed, after, tmp_path)[0]
    assert_same(again["loaded"], found["end"])


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), (1, 2)])
def test_a_killed_run_goes_on_with_other_ranks_as_if_it_had_not_ended(
    groups: dict[int, Group], before: int, after: int, tmp_path: Path
) -> None:
    """Up to the order of sums over ranks, in fp32."""
    expected = run(groups, cases.uninterrupted, before, tmp_path, until=8, bf16=False)[0]
    with pytest.raises(RankFailed, match="the process ended"):
        run(groups, cases.killed, before, tmp_path, steps=5, bf16=False)
    found = run(groups, cases.resumed, after, tmp_path, until=8, bf16=False)[0]
    assert found["start"] in (4, 5)
    assert found["client_state"] == {"next": found["start"]}
    torch.testing.assert_close(found["losses"], expected["losses"][found["start"] :], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["end"], expected["end"], rtol=1e-3, atol=1e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "units": {"unit_size": 1 << 20},
    "tiles": {"tile_size": 8192},
    "host memory": {"device": "cpu"},
    "fp32 masters": {"master": "fp32"},
    "fp32 parameters": {"bf16": False},
}


@pytest.mark.parametrize(("layout", "steps"), [(layout, 2 + number % 2) for number, layout in enumerate(LAYOUTS)])
def test_another_layout_loads_the_committed_bits(
    groups: dict[int, Group], layout: str, steps: int, tmp_path: Path
) -> None:
    committed = run(groups, cases.interrupted, 1, tmp_path, steps=steps)[0]
    found = run(groups, cases.resumed, 1, tmp_path, **LAYOUTS[layout])[0]
    assert found["generations"] == [2]
    if layout == "fp32 parameters":  # the masters are the parameters then, and frozen ones are cast
        for states in (found["loaded"], committed):
            for name in [name for name in states if "/" not in name or name.endswith("/param")]:
                del states[name]
    assert_same(found["loaded"], committed)


@pytest.mark.parametrize(("before", "after"), [("fp32", "8bit"), ("8bit", "bf16"), ("bf16", "fp32")])
def test_moments_are_converted_as_those_of_a_checkpoint(
    groups: dict[int, Group], before: str, after: str, tmp_path: Path
) -> None:
    run(groups, cases.interrupted, 1, tmp_path, steps=3, moments=before)
    case = cases.other_formats
    ((found, expected),) = groups[1].run(case, folder=str(tmp_path), ranks=1, before=before, after=after)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("before", "after", "last", "where"),
    [
        (2, 1, 1, "before the commit"),
        (1, 2, 2, "before the record"),
        (2, 1, 1, "before the removal"),
        pytest.param(1, 2, 4, "before the commit", marks=pytest.mark.slow),
        pytest.param(2, 1, 1, "before the record", marks=pytest.mark.slow),
        pytest.param(1, 2, 4, "before the removal", marks=pytest.mark.slow),
    ],
)
def test_a_crash_while_a_run_is_converted_loses_nothing(
    groups: dict[int, Group], before: int, after: int, last: int, where: str, tmp_path: Path
) -> None:
    committed = run(groups, cases.interrupted, before, tmp_path, steps=3)[0]
    with pytest.raises(RankFailed, match="the process ended"):
        run(groups, cases.stopped_while_resuming, after, tmp_path, where=where)
    for found in run(groups, cases.resumed, last, tmp_path, until=4):
        assert_same(found["loaded"], committed)
        assert (found["start"], len(found["generations"]), len(found["losses"])) == (3, 1, 1)


def test_files_that_one_rank_cannot_see_are_an_error_on_all(groups: dict[int, Group], tmp_path: Path) -> None:
    """Which leaves the run as it was."""
    committed = run(groups, cases.interrupted, 1, tmp_path, steps=3)[0]
    texts = run(groups, cases.refused, 2, tmp_path, lacks=1)
    assert texts == ["CheckpointError: rank-00000.json is missing on rank 1"] * 2
    assert_same(run(groups, cases.resumed, 2, tmp_path)[0]["loaded"], committed)


def test_a_rank_whose_files_are_gone_is_named(groups: dict[int, Group], tmp_path: Path) -> None:
    committed = run(groups, cases.interrupted, 2, tmp_path, steps=3)[0]
    path, elsewhere = tmp_path / "run" / "0001" / "rank-00001.states", tmp_path / "elsewhere"
    path.rename(elsewhere)
    (text,) = run(groups, cases.refused, 1, tmp_path)
    assert text.startswith(f"CheckpointError: {path} is missing: the files of all ranks are needed, also those on the")
    elsewhere.rename(path)
    assert_same(run(groups, cases.resumed, 1, tmp_path)[0]["loaded"], committed)


def test_ranks_that_name_different_runs_are_refused(groups: dict[int, Group], tmp_path: Path) -> None:
    run(groups, cases.interrupted, 1, tmp_path, steps=1)
    (tmp_path / "run1").mkdir()
    (tmp_path / "run0").symlink_to(tmp_path / "run")
    for text in run(groups, cases.refused, 2, tmp_path, directory="run{rank}"):
        assert text.startswith("RanksError: the ranks name different checkpoints.")
