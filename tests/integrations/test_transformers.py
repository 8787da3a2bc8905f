"""transformers' Trainer with deepspeed= trains as without, in one process and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for library in ("transformers", "accelerate", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import TWO_RANKS, measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
CASES = ("plain", "stages", "clipping", "no_clipping", "public_configs", "bf16", "epochs", "resuming", "best_model")
MODELS = ("lora", "pretrained", "ungathered", "generation", "evaluation_only")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all cases, from one process."""
    return measure("trainer_script.py", tmp_path_factory.mktemp("trainer"), *CASES, *MODELS)[0]


def check_equal(ours: Any, plain: Any, rel: float = 1e-4) -> None:
    """The losses, the evaluation's and the norms of the gradients are the same."""
    assert isinstance(ours, dict), ours
    assert len(plain["loss"]) > 5
    for key in ("loss", "grad_norm", "eval_loss", "final"):
        assert ours[key] == pytest.approx(plain[key], rel=rel if key != "grad_norm" else 10 * rel), key


def test_stages_and_optimizers(results: dict[str, Any]) -> None:
    """Stages 0 to 3 with the config's and with Trainer's AdamW, and every state on nvme."""
    assert isinstance(results["stages"], dict), results["stages"]
    assert len(results["stages"]) == 9
    for run in results["stages"].values():
        check_equal(run, results["plain"])


@pytest.mark.parametrize("case", ["clipping", "epochs", "resuming", "best_model", "lora", "pretrained", "generation"])
def test_equal_runs(case: str, results: dict[str, Any]) -> None:
    """max_grad_norm with accumulation, an epoch's shorter last step, and what the cases below check further."""
    assert isinstance(results[case], list), results[case]
    plain, *others = results[case]
    for ours in others:
        check_equal(ours, plain)


def test_clipping_changes_the_losses(results: dict[str, Any]) -> None:
    assert min(results["clipping"][0]["grad_norm"]) > 0.25, "every step is clipped"


def test_no_clipping(results: dict[str, Any]) -> None:
    """max_grad_norm=0 has the losses and the norms of the plain Trainer."""
    plain, *others = results["no_clipping"]
    assert len(plain["grad_norm"]) == 10
    for ours in others:
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3) and plain["grad_norm"]


def test_public_configs(results: dict[str, Any]) -> None:
    """ZeRO-2 and ZeRO-3 offload files; DeepSpeed's warm-up has rate 0 at the first two steps."""
    runs = results["public_configs"]
    assert isinstance(runs, dict), runs
    check_equal(runs["transformers_zero2"], runs["transformers_zero3"])
    check_equal(runs["accelerate_zero2_offload"], runs["accelerate_zero3_offload"])
    assert runs["accelerate_zero3_offload"]["learning_rate"][0] == 0
    assert runs["accelerate_zero3_offload"]["loss"][-1] < 3.5 < runs["transformers_zero3"]["loss"][-1]


def test_bf16(results: dict[str, Any]) -> None:
    plain, *others = results["bf16"]
    for ours in others:
        check_equal(ours, plain, rel=1e-2)


def test_resuming_equals_an_uninterrupted_run(results: dict[str, Any]) -> None:
    """Runs resumed from step 6 of 10, in stages 2 and 3, with the states on nvme and with a client's optimizer."""
    for run in results["resuming"]:
        assert run["resumed"]["loss"][6:] == run["loss"][6:]
        assert run["resumed"]["final"] == run["final"]
        assert run["files"] == ["checkpoint-10", "checkpoint-6", "checkpoint-9"]


def test_the_best_model_is_loaded(results: dict[str, Any]) -> None:
    for run in results["best_model"]:
        assert run["final"] == pytest.approx(run["best"], rel=1e-6)
        assert run["best"] < 0.9 * run["eval_loss"][-1], "the last is worse"


def test_lora(results: dict[str, Any]) -> None:
    """Adapters are those of the plain Trainer, and a checkpoint has no frozen base."""
    for run in results["lora"]:
        assert run["resumed"]["loss"][5:] == pytest.approx(run["loss"][5:], rel=1e-6)
        assert run["distance"] < 1e-4 < run["moved"] / 100
        assert run["bytes"] < 125_000, "the base has 114 kB more"


def test_from_pretrained(results: dict[str, Any]) -> None:
    """Weights loaded under zero.Init, trained and saved by save_model."""
    for run in results["pretrained"]:
        assert "model.safetensors" in run["files"]
        assert run["distance"] < 1e-3


def test_a_stage_3_model_that_is_not_gathered(results: dict[str, Any]) -> None:
    for trained, converted in results["ungathered"]:
        assert converted == pytest.approx(trained, rel=1e-5)


def test_generation(results: dict[str, Any]) -> None:
    """predict_with_generate of Seq2SeqTrainer."""
    plain, *others = results["generation"]
    for ours in others:
        assert ours["written"] == plain["written"]


def test_evaluation_without_training(results: dict[str, Any]) -> None:
    plain, ours = results["evaluation_only"]
    assert ours == pytest.approx(plain, rel=1e-5)


def test_two_ranks(tmp_path: Path, results: dict[str, Any]) -> None:
    """Two ranks have the losses of one rank with batches of twice the size."""
    (plain,) = measure("trainer_script.py", tmp_path, "wide")
    for run in measure("trainer_script.py", tmp_path, "ranks", launcher=TWO_RANKS):
        assert isinstance(run["ranks"], dict), run["ranks"]
        assert run["ranks"]["world"] == "2"
        for stage in ("2", "3"):
            check_equal(run["ranks"][stage], plain["wide"])


def test_the_documented_command(tmp_path: Path) -> None:
    """Two ranks on the CPU without --use_cpu have different data, and the losses of one rank with larger batches."""
    (plain,) = measure("trainer_script.py", tmp_path, "wide")
    runs = [run["documented"] for run in measure("trainer_script.py", tmp_path, "documented", launcher=TWO_RANKS)]
    assert all(isinstance(run, dict) for run in runs), runs
    assert [run.pop("of") for run in runs] == [[0, 2], [1, 2]]
    for run in runs:
        check_equal(run, plain["wide"])


def test_a_process_group_before_the_arguments(tmp_path: Path) -> None:
    """Ranks of the script's own process group have different data too, in each of its Trainers."""
    (plain,) = measure("trainer_script.py", tmp_path, "wide")
    for run in measure("trainer_script.py", tmp_path, "initialized", launcher=TWO_RANKS):
        assert isinstance(run["initialized"], list), run["initialized"]
        for found in run["initialized"]:
            check_equal(found, plain["wide"])


def test_optimizers_that_accelerate_replaces(tmp_path: Path) -> None:
    """Each trains as without an engine, or is refused by its name."""
    (found,) = measure("trainer_script.py", tmp_path, "optimizers")
    results = found["optimizers"]
    assert isinstance(results, dict), results
    plain, forced, free = results["sgd"]
    assert "param_groups of SGD" in forced and '"zero_force_ds_cpu_optimizer": false' in forced
    assert free == pytest.approx(plain, rel=1e-4)
    plain, *both = results["adagrad"]
    for run in both:
        assert run == pytest.approx(plain, rel=1e-4)
    for name, optim in (("RMSprop", "rmsprop"), ("Adafactor", "adafactor")):
        plain, forced, free = results[optim]
        assert f"param_groups of {name}" in forced and '"zero_force_ds_cpu_optimizer": false' in forced
        assert free == pytest.approx(plain, rel=1e-4)
