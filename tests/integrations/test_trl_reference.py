"""TRL's DPO, KTO, GRPO and RLOO with deepspeed= train as without: reference models, and generation in stage 3."""

from __future__ import annotations

from typing import Any

import pytest

for library in ("trl", "datasets", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import TWO_RANKS, measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
ADAPTERS = ("dpo_lora", "kto_lora", "grpo_lora", "rloo_lora")
CASES = ("dpo", "kto", "grpo", "grpo_beta", "grpo_ungathered", "rloo", "rloo_beta", *ADAPTERS)
ON_RANKS = ("dpo", "kto", "grpo", "grpo_beta", "rloo", "rloo_beta", *ADAPTERS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("trl_reference_script.py", tmp_path_factory.mktemp("trl"), *CASES)[0]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return measure("trl_reference_script.py", tmp_path_factory.mktemp("ranks"), *ON_RANKS, launcher=TWO_RANKS)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_a_plain_trainer(case: str, results: dict[str, Any]) -> None:
    """Stages 2 and 3 are compared. A generation gathers the whole model, also if it has more units than buffers."""
    assert isinstance(results[case], list), results[case]
    plain, *others = results[case]
    assert len(others) == 3
    for ours in others:
        check_equal(ours, plain)


@pytest.mark.parametrize("case", ON_RANKS)
def test_two_ranks_equal_plain_ranks(case: str, on_ranks: list[dict[str, Any]]) -> None:
    """PyTorch's DistributedDataParallel on two ranks."""
    for results in on_ranks:
        assert isinstance(results[case], list), results[case]
        plain, ours = results[case]
        check_equal(ours, plain)


def check_equal(ours: list[dict[str, float]], plain: list[dict[str, float]]) -> None:
    """Losses and norms within 1e-6, which is more than fp32 rounds, and small differences of probabilities to 1e-5."""
    assert len(plain) == 4 and plain[0]["grad_norm"] > 0
    for theirs, mine in zip(plain, ours, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            rel = 1e-6 if key in ("loss", "grad_norm") else 1e-5
            assert mine[key] == pytest.approx(value, rel=rel, abs=1e-6), key
