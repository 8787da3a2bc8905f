"""Models of `transformers` to and from Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.export import export
from support.configs import engine_config
from support.hugging_face import BATCHES, MODELS, loss_of, transformers
from support.loops import open_engine, train
from support.models import seeded
from support.states import states_of


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_computes_what_the_engine_computes(tmp_path: Path, name: str, dtype: str | None) -> None:
    """Logits are bit-identical by default; with fp32 they differ by the rounding of parameters to bf16."""
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


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("named", ["float32", "bfloat16", None])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_loads_in_the_dtype_of_its_weights(tmp_path: Path, name: str, named: str | None, bf16: bool) -> None:
    """Logits of an exported folder are bit-identical to the engine's, for any dtype in the original config."""
    model: Any = seeded(MODELS[name]).eval()
    model.config.save_pretrained(tmp_path / "config")
    file = tmp_path / "config" / "config.json"
    said = json.loads(file.read_text())
    said = {key: value for key, value in said.items() if key not in ("dtype", "torch_dtype")}
    file.write_text(json.dumps(said | ({"dtype": named, "torch_dtype": named} if named else {})))
    with open_engine(model, engine_config(folder=tmp_path, bf16=bf16, unit_size=60_000)) as engine:
        train(engine, BATCHES[:2], loss_of)
        engine.save_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            expected = engine(input_ids=BATCHES[3][0]).logits
    out = export(tmp_path / "saved", tmp_path / "out", config_from=tmp_path / "config")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa").eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=BATCHES[3][0]).logits, expected)


@pytest.mark.parametrize("size", ["5GB", "20kB"], ids=["one file", "shards"])
@pytest.mark.parametrize("name", MODELS)
def test_what_save_pretrained_wrote_trains_as_the_model_itself(tmp_path: Path, name: str, size: str) -> None:
    """A model on the meta device, buffers included, trains as the original."""
    seeded(MODELS[name]).save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (size == "20kB")
    config = engine_config(folder=tmp_path, bf16=True, unit_size=60_000)
    with open_engine(seeded(MODELS[name]), config) as engine:
        expected, losses = states_of(engine), train(engine, BATCHES, loss_of)
    with torch.device("meta"):
        model = MODELS[name]()
    assert infinity.load_pretrained(model, tmp_path / "saved") == ([], [])
    with open_engine(model, config) as engine:
        found = states_of(engine)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
        assert train(engine, BATCHES, loss_of) == losses


def test_a_head_of_its_own_over_a_pretrained_body(tmp_path: Path) -> None:
    """The weights are loaded into the body, whose folder lacks the head and uses the body's names."""
    seeded(MODELS["llama"]).model.save_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        model: Any = MODELS["llama"]()
    infinity.load_pretrained(model.model, tmp_path / "saved")
    with open_engine(model, engine_config(folder=tmp_path, unit_size=60_000)) as engine:
        state = engine.state_dict()
        expected = seeded(MODELS["llama"]).state_dict()
        assert all(torch.equal(state[key], value) for key, value in expected.items() if key.startswith("model."))
        assert 0 < state["lm_head.weight"].std() < 0.1
