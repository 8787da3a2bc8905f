"""TRL's SFTTrainer with deepspeed= trains as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for library in ("trl", "datasets", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import TWO_RANKS, measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
CASES = ("plain", "accumulation", "lora")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("trl_script.py", tmp_path_factory.mktemp("trl"), *CASES, "wide")[0]


@pytest.mark.parametrize("case", CASES)
def test_stages_2_and_3_equal_the_plain_trainer(case: str, results: dict[str, Any]) -> None:
    """Its fused loss reads the head's weight outside of the head, in forward and in backward."""
    assert isinstance(results[case], list), results[case]
    plain, *others = results[case]
    assert len(others) == 2
    check_equal(plain, others)


def test_two_ranks(tmp_path: Path, results: dict[str, Any]) -> None:
    """Full and LoRA runs on two ranks have the losses of one rank with batches of twice the size."""
    for ranks in measure("trl_script.py", tmp_path, "ranks", launcher=TWO_RANKS):
        assert isinstance(ranks["ranks"], list), ranks["ranks"]
        for plain, ours in zip(results["wide"], ranks["ranks"], strict=True):
            check_equal(plain, ours)


def check_equal(plain: dict[str, Any], others: list[dict[str, Any]]) -> None:
    assert len(plain["loss"]) == 8
    for ours in others:
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
        assert ours["final"] == pytest.approx(plain["final"], rel=1e-4)
