"""The study of the formats' quality: every kind of run trains, and what is left says what was measured."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "bench" / "quality.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe(script: ModuleType) -> Any:
    return script.Recipe(steps=4, layers=2, hidden=32, heads=2, sequence=16, batch=2, held_out_windows=8)


@pytest.fixture(scope="module")
def runs(script: ModuleType, recipe: Any) -> list[dict[str, Any]]:
    """One run of each kind, as a process of the study gives it back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = [json.loads(json.dumps(script.train(recipe, name, 0))) for name in script.FORMATS]
    torch.set_num_threads(threads)
    return found


@pytest.fixture
def study(script: ModuleType, recipe: Any, runs: list[dict[str, Any]], tmp_path: Path) -> Any:
    study = script.Study(tmp_path / "trial.json", recipe)
    study.head = {"command": "a command", "machine": "a machine", "text": "a text", "traffic": {"8bit": 8.0}}
    for run in runs:
        study.add(run)
    return study


def test_remainder_and_fp32_master_are_the_same_to_the_bit(script: ModuleType, study: Any) -> None:
    assert script.is_identical(study, "remainder")
    assert not any(script.is_identical(study, name) for name in ("bf16", "8bit", "torch", "fp32"))


def test_other_kinds_stay_near_the_reference(script: ModuleType, study: Any) -> None:
    for name in script.FORMATS:
        (difference,) = script.differences(study, name)
        assert abs(difference) < 1, name


def test_finished_runs_are_kept_and_not_repeated(script: ModuleType, study: Any, recipe: Any) -> None:
    again = script.Study(study.path, recipe)
    assert again.runs == study.runs and again.head == study.head
    script.carry_out(again, list(script.FORMATS), [0], jobs=1)  # nothing left to do
    with pytest.raises(SystemExit, match="other settings"):
        script.Study(study.path, script.Recipe(steps=5))


def test_the_page_says_what_was_measured(script: ModuleType, study: Any) -> None:
    text = script.page(study)
    assert "every bit equal" in text and "NOT" not in text
    for run in study.runs:
        assert f"{run['held_out'][-1][1]:.4f}" in text
    study.of("remainder")[0]["losses"][-1] += 1e-6
    assert "**NOT equal**" in script.page(study)


def test_the_picture_is_drawn(script: ModuleType, study: Any) -> None:
    pytest.importorskip("matplotlib")
    script.plot(study, study.path.with_suffix(".png"))
    assert study.path.with_suffix(".png").stat().st_size > 10_000


def test_traffic_is_that_of_the_states(script: ModuleType, recipe: Any) -> None:
    """Read once and written once a step; tiny units are padded to whole tiles."""
    bytes_moved = script.traffic(recipe, "8bit")
    assert 2 * script.FORMATS["8bit"].state_bytes <= bytes_moved < 20
