"""LLaMA-Factory with its ds_z3_offload_config trains as without, on one and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llamafactory", reason="make test-llamafactory installs it, with the releases that it asks for")

from integrations.hugging_face import ONE_RANK, TWO_RANKS, measure

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
LAUNCHERS = {1: ONE_RANK, 2: TWO_RANKS}


@pytest.mark.parametrize("ranks", LAUNCHERS)
@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "rm"])
def test_equals_a_run_without_deepspeed(stage: str, ranks: int, tmp_path: Path) -> None:
    """Losses and norms of full fine-tuning; DPO and KTO with a reference model."""
    plain, ours = (_trained(f"{stage}_{kind}", ranks, tmp_path / kind) for kind in ("plain", "deepspeed"))
    assert len(plain) == 4 and plain[0]["grad_norm"] > 0
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def _trained(case: str, ranks: int, folder: Path) -> list[dict[str, float]]:
    folder.mkdir()
    results = measure("llamafactory_script.py", folder, case, launcher=LAUNCHERS[ranks])
    assert [len(rank[case]) for rank in results[1:]] == [0] * (ranks - 1), results
    found = results[0][case]
    assert isinstance(found, list), found
    return found
