"""Models of `transformers` to and from Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint.export import export
from support.configs import engine_config
from support.hugging_face import BATCHES, MODELS, loss_of, transformers
from support.loops import open_engine, train
from support.models import seeded


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_computes_what_the_engine_computes(tmp_path: Path, name: str, dtype: str | None) -> None:
    """By default the very logits; as fp32 to what rounding the parameters to bf16 changes."""
    model: Any = seeded(MODELS[name]).eval()
    model.config.save_pretrained(tmp_path / "config")
    with open_engine(model, engine_config(folder=tmp_path, bf16=True, unit_size=60_000)) as engine:
        train(engine, BATCHES[:3], loss_of)
        engine.save_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            expected = engine(input_ids=BATCHES[3][0]).logits
    out = export(
        tmp_path / "saved", tmp_path / "out", dtype=dtype, config_from=tmp_path / "config", max_shard_size="20kB"
    )
    kept = torch.bfloat16 if dtype is None else torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=kept, attn_implementation="sdpa").eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {kept}
    with torch.no_grad():
        logits = loaded(input_ids=BATCHES[3][0]).logits
    if dtype is None:
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected.float(), rtol=2e-2, atol=2e-2)
