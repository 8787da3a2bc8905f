"""TRL's SFTTrainer with deepspeed= trains as without."""

from __future__ import annotations

from typing import Any

import pytest

for library in ("trl", "datasets", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

from integrations.hugging_face import measure  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
CASES = ("plain", "accumulation", "lora")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("trl_script.py", tmp_path_factory.mktemp("trl"), *CASES)[0]


@pytest.mark.parametrize("case", CASES)
def test_stages_2_and_3_equal_the_plain_trainer(case: str, results: dict[str, Any]) -> None:
    """Its fused loss reads the head's weight outside of the head, in forward and in backward."""
    assert isinstance(results[case], list), results[case]
    plain, *others = results[case]
    assert len(plain["loss"]) == 8 and len(others) == 2
    for ours in others:
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
        assert ours["final"] == pytest.approx(plain["final"], rel=1e-4)
