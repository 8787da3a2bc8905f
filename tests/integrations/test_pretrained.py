"""from_pretrained under a stage 3 config on two ranks: values, memory, and training from them."""

from __future__ import annotations

from typing import Any

import pytest

for library in ("transformers", "accelerate", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import TWO_RANKS, measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
SCRIPT = "pretrained_script.py"
CASES = ("kinds", "base", "memory", "trained_alike", "resized")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process without deepspeed=, and the folder with the saved models."""
    folder = tmp_path_factory.mktemp("pretrained")
    return measure(SCRIPT, folder, "prepare", "trained_alike")[0] | {"folder": folder}


@pytest.fixture(scope="module")
def ranks(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of the two ranks."""
    return measure(SCRIPT, plain["folder"], *CASES, launcher=TWO_RANKS)


def test_values_equal_a_plain_from_pretrained(ranks: list[dict[str, Any]]) -> None:
    """Gathered values on both ranks: of tied weights, converted experts, a file with both copies of a tied weight."""
    for rank in ranks:
        assert list(rank["kinds"]) == ["gpt2", "llama", "bert", "t5", "mixtral", "copies"], rank["kinds"]
        assert not any(rank["kinds"].values()), rank["kinds"]


def test_missing_weights_are_rank_0s(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["base"] for rank in ranks)
    assert isinstance(first, dict), first
    assert first == second
    assert first["cls.predictions.transform.dense.weight"][1] == pytest.approx(0.02, rel=0.1)


def test_only_rank_0_holds_the_model(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["memory"] for rank in ranks)
    assert isinstance(first, dict), first
    assert first["grown"] > 0.9 * first["size"] > 4 * second["grown"], (first, second)


@pytest.mark.parametrize("adapter", ["None", "True", "pissa"])
def test_two_ranks_train_as_one_process(adapter: str, plain: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Full and LoRA runs, in memory and with all states on nvme; checkpoints of adapters leave the base out."""
    for rank in ranks:
        assert isinstance(rank["trained_alike"], dict), rank["trained_alike"]
        expected = plain["trained_alike"][f"plain {adapter}"]
        for place in ("memory", "nvme"):
            run = rank["trained_alike"][f"{place} {adapter}"]
            assert run["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
            assert run["final"] == pytest.approx(expected["final"], rel=1e-4)
            assert (run["bytes"] < 160_000) == (adapter != "None"), "the base has 112 kB more"


def test_added_tokens(ranks: list[dict[str, Any]]) -> None:
    """Embeddings grow after the load, before initialize; both ranks train the same model."""
    first, second = (rank["resized"] for rank in ranks)
    assert isinstance(first, dict), first
    assert first == second and first["loss"][-1] < 0.9 * first["loss"][0]
