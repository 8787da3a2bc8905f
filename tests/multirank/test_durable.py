"""Durable runs on two ranks: all go on from the last step that all have committed."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.durable.condition import condition, owned
from infinity.tiers.open_tiers import states_of
from multirank import durable_cases as cases
from support.ranks import Group

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, next forward, bf16": {"clip": 0.5, "bf16": True},
    "stage 1": {"stage": 1, "param": "none"},
    "stage 3, in host memory": {"param": "cpu", "optim": "cpu", "clip": 0.5},
}


@pytest.fixture(scope="module")
def whole(pair: Group, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses and parameters of each rank, trained without an interruption and without options."""
    return pair.run(cases.uninterrupted, folder=str(tmp_path_factory.mktemp("whole")))


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
def test_ranks_resume_the_last_step_that_all_have(pair: Group, whole: Any, tmp_path: Path, stop: int) -> None:
    """One rank has a record of a step more; its slots are written again, and the record is dropped before that."""
    first = pair.run(cases.begun_and_left_behind, folder=str(tmp_path), stop=stop)
    rest = pair.run(cases.gone_on, folder=str(tmp_path))
    check(whole, first, rest, stop - 1)


def test_all_ranks_refuse_to_replace_a_run(pair: Group, tmp_path: Path) -> None:
    pair.run(cases.begun, folder=str(tmp_path), stop=2)
    pair.run(cases.refused_without_resume, folder=str(tmp_path))


@pytest.mark.parametrize("of", [0, 1])
def test_a_copy_with_files_of_different_steps_is_refused_on_all_ranks(pair: Group, tmp_path: Path, of: int) -> None:
    pair.run(cases.copied_while_training, folder=str(tmp_path), of=of)
    texts = pair.run(cases.refused, folder=str(tmp_path), run="copy")
    assert all("its ranks have records of different steps" in text for text in texts), texts


def test_states_of_one_rank_that_are_older_are_refused_on_all_ranks(pair: Group, tmp_path: Path) -> None:
    pair.run(cases.copied_while_training, folder=str(tmp_path), of=1)
    copy, run = (tmp_path / name / "0001" for name in ("copy", "run"))
    shutil.copy2(copy / states_of(1), run / states_of(1))
    texts = pair.run(cases.refused, folder=str(tmp_path), run="run")
    assert all("rank-00001.states does not hold the states of its commit" in text for text in texts), texts


def test_files_of_two_runs_of_the_same_steps_are_refused(pair: Group, tmp_path: Path) -> None:
    for run in ("run", "other"):
        pair.run(cases.begun, folder=str(tmp_path), stop=2, run=run)
    for path in (tmp_path / "other" / "0001").glob("rank-00001.*"):
        shutil.copy2(path, tmp_path / "run" / "0001" / path.name)
    texts = pair.run(cases.refused, folder=str(tmp_path), run="run")
    assert all("different jobs wrote the records of its ranks" in text for text in texts), texts


LOST: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("steps", [1, 2])
def test_any_lost_records(pair: Group, tmp_path: Path, steps: int, how: str) -> None:
    """The run is refused on all ranks if the last record of a rank is lost, and a check says the same."""
    pair.run(cases.begun, folder=str(tmp_path), stop=steps, run="whole")
    names = [f"rank-0000{rank}.record-{slot}" for rank in range(2) for slot in range(2)]
    for lost in (each for size in (1, 2, 4) for each in itertools.combinations(names, size)):
        run = Path(shutil.copytree(tmp_path / "whole", tmp_path / "run"))
        for name in lost:
            LOST[how](run / "0001" / name)
        ranks = [str(rank) for rank in range(2) if f"rank-0000{rank}.record-{steps % 2}" in lost]
        before = {path: path.read_bytes() for path in run.rglob("rank-*.*[!k]")}
        with owned(run) as held:
            found = condition(held, run, verify=False)
        texts = pair.run(cases.refused, folder=str(tmp_path), run="run")
        assert found.is_intact == (not ranks), lost
        if ranks:
            problem = f"the records of rank {', '.join(ranks)} are damaged or missing. Restore the files of all ranks"
            assert all(problem in text and "To begin anew, remove the folder" in text for text in texts), (lost, texts)
            assert before == {path: path.read_bytes() for path in run.rglob("rank-*.*[!k]")}
            assert [each.partition(":")[0] for each in found.faults] == [f"rank {rank}" for rank in ranks], lost
        else:
            assert texts == ["", ""], lost
        shutil.rmtree(run)


@pytest.mark.parametrize("lost", [0, 1])
def test_states_of_a_rank_that_are_unlinked_cost_no_step(pair: Group, whole: Any, tmp_path: Path, lost: int) -> None:
    found = pair.run(cases.without_files, folder=str(tmp_path), lost=lost)
    for (losses, values), (kept, present) in zip(whole, found, strict=True):
        assert kept == [*losses[:3], *losses[4:]]
        assert all(torch.equal(values[name], present[name]) for name in values)


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_commit_again_once_files_are_back(pair: Group, whole: Any, tmp_path: Path, lost: int) -> None:
    pair.run(cases.back_after_a_while, folder=str(tmp_path), lost=lost)
    rest = pair.run(cases.gone_on, folder=str(tmp_path))
    check(whole, [losses[:5] for losses, _ in whole], rest, 5)


def check(expected: list[Any], first: list[Any], rest: list[Any], step: int) -> None:
    for (losses, values), before, (went_on, after, present) in zip(expected, first, rest, strict=True):
        assert went_on == step
        assert losses == before[:step] + after
        assert all(torch.equal(values[name], present[name]) for name in values)
