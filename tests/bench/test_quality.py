"""The study of the formats' quality: every kind of run trains, and what is left says what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from quality import Study, carry_out
from quality_recipe import FORMATS, Recipe
from quality_train import traffic, train
from report import page, quality


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe(steps=4, layers=2, hidden=32, heads=2, sequence=16, batch=2, held_out_windows=8)


@pytest.fixture(scope="module")
def runs(recipe: Recipe) -> list[dict[str, Any]]:
    """One run of each kind, as a process of the study gives it back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = [json.loads(json.dumps(train(recipe, name, 0))) for name in FORMATS]
    torch.set_num_threads(threads)
    return found


@pytest.fixture
def study(recipe: Recipe, runs: list[dict[str, Any]], tmp_path: Path) -> Study:
    study = Study(tmp_path / "trial.json", recipe)
    study.result |= {"command": "a command", "machine": "a machine", "text": "a text", "traffic": {"8bit": 8.0}}
    for run in runs:
        study.add(run)
    return study


def test_remainder_and_fp32_master_are_the_same_to_the_bit(study: Study) -> None:
    assert quality.is_identical(study.result, "remainder")
    assert not any(quality.is_identical(study.result, name) for name in ("bf16", "8bit", "torch", "fp32"))


def test_other_kinds_stay_near_the_reference(study: Study) -> None:
    for name in FORMATS:
        (difference,) = quality.differences(study.result, name)
        assert abs(difference) < 1, name


def test_finished_runs_are_kept_and_not_repeated(study: Study, recipe: Recipe) -> None:
    again = Study(study.path, recipe)
    assert again.result == study.result
    carry_out(again, list(FORMATS), [0], jobs=1)  # nothing left to do
    with pytest.raises(SystemExit, match="other settings"):
        Study(study.path, Recipe(steps=5))


def test_a_file_has_a_line_for_each_run(study: Study) -> None:
    lines = study.path.read_text().splitlines()
    assert sum(line.startswith('{"format"') for line in lines) == len(FORMATS)


def test_committed_runs_are_kept_as_they_are(tmp_path: Path) -> None:
    """Saving the published study again changes no byte of it."""
    committed = harness.result_path("quality")
    copy = tmp_path / "quality.json"
    copy.write_text(committed.read_text())
    Study(copy, Recipe()).save()
    assert copy.read_text() == committed.read_text()


def test_the_page_says_what_was_measured(study: Study) -> None:
    text = page.new_page(quality.REPORT, study.result, "trial")
    assert "every bit equal" in text
    for run in study.runs:
        assert f"{run['held_out'][-1][1]:.4f}" in text
    remainder = next(run for run in study.runs if run["format"] == "remainder")
    remainder["losses"] = [*remainder["losses"][:-1], remainder["losses"][-1] + 1e-6]
    assert "every bit equal" not in page.new_page(quality.REPORT, study.result, "trial")
    assert quality.figures(study.result)["remainder: runs that differ in a bit"] == 1


def test_the_picture_is_drawn(study: Study) -> None:
    pytest.importorskip("matplotlib")
    quality.plot(study.result, study.path.with_suffix(".png"))
    assert study.path.with_suffix(".png").stat().st_size > 10_000


def test_traffic_is_that_of_the_states(recipe: Recipe) -> None:
    """Read once and written once a step; tiny units are padded to whole tiles."""
    bytes_moved = traffic(recipe, "8bit")
    assert 2 * FORMATS["8bit"].state_bytes <= bytes_moved < 20
