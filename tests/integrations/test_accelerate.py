"""Accelerate's loop with DeepSpeedPlugin trains as without, in one process, on two ranks and under its launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for library in ("accelerate", "transformers"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import SUBSTITUTED, TWO_RANKS, measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
LAUNCH = "-m accelerate.commands.launch --use_deepspeed --zero_stage 3 --num_processes 1 --num_machines 1"
OPTIONS = "--mixed_precision no --dynamo_backend no --zero3_save_16bit_model true"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accelerate")
    return measure("accelerate_script.py", folder, "steps", "accumulation", "states", "weights", "wide")[0]


def check_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-3)
    assert ours["weights"] == pytest.approx(plain["weights"], rel=1e-4)
    assert ours["names"] == plain["names"]


@pytest.mark.parametrize("case", ["steps", "accumulation"])
def test_plugins_equal_a_plain_accelerator(case: str, results: dict[str, Any]) -> None:
    """Stages 2 and 3, by the plugin's arguments with torch's AdamW, and by a config with DummyOptim."""
    assert isinstance(results[case], dict), results[case]
    assert len(results[case]) == 5
    for run in results[case].values():
        check_equal(run, results[case]["plain"])


def test_load_state_resumes(results: dict[str, Any]) -> None:
    assert isinstance(results["states"], dict), results["states"]
    for expected, resumed in results["states"].values():
        assert len(expected) == 5 and resumed == pytest.approx(expected, rel=1e-6)


def test_saved_weights(results: dict[str, Any]) -> None:
    """save_model, and save_pretrained of the unwrapped model, hold the trained weights."""
    found = results["weights"]
    assert isinstance(found, dict), found
    assert found["kind"] == "GPT2LMHeadModel" and found["same"] and found["names"] == 29 and found["moved"] > 1e-3


def test_two_ranks(results: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks have the gradients and weights of one process with batches of twice the size. Ranks that a PartialState
    did not count are an error.

    Accelerate advances a schedule outside of the config once for each rank, so only stages are compared there.
    """
    for number, run in enumerate(measure("accelerate_script.py", tmp_path, "ranks", "counted", launcher=TWO_RANKS)):
        found, counted = run["ranks"], run["counted"]
        assert isinstance(found, dict), found
        for name in ("config 2", "config 3"):
            assert found[name]["ranks"] == 2
            assert found[name]["norms"] == pytest.approx(results["wide"]["norms"], rel=1e-3)
            if number == 0:
                assert found[name]["weights"] == pytest.approx(results["wide"]["weights"], rel=1e-4)
        assert found["arguments 3"]["losses"] == pytest.approx(found["arguments 2"]["losses"], rel=1e-5)
        assert isinstance(counted, dict), counted
        assert "Accelerate counts 1 of the 2 ranks" in counted["None"] and 'pass backend="gloo"' in counted["None"]
        assert counted["gloo"]["norms"] == pytest.approx(found["config 2"]["norms"], rel=1e-5)


def test_accelerate_launch(results: dict[str, Any], tmp_path: Path) -> None:
    launcher = (*SUBSTITUTED, *LAUNCH.split(), *OPTIONS.split())
    (run,) = measure("accelerate_script.py", tmp_path, "launched", launcher=launcher)
    assert isinstance(run["launched"], dict), run["launched"]
    assert run["launched"]["stage"] == 3
    assert run["launched"]["losses"] == pytest.approx(results["steps"]["plain"]["losses"][:6], rel=1e-4)
