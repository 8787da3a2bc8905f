"""QLoRA: bitsandbytes' layers under adapters of PEFT keep no buffer of a unit, and no warning says that one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

for library in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(library, reason="make test-integrations installs it")

import bitsandbytes as bnb  # noqa: E402
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training  # noqa: E402
from torch import nn  # noqa: E402
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed  # noqa: E402

import infinity  # noqa: E402
from infinity.model.bitsandbytes import Codes  # noqa: E402
from support.configs import engine_config  # noqa: E402
from support.loops import open_engine, plain, train  # noqa: E402
from support.models import seeded  # noqa: E402

pytestmark = pytest.mark.integrations
TOKENS = torch.arange(64).view(4, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama."""
    path = tmp_path_factory.mktemp("base")
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(path)
    return path


def adapted(folder: Path, dtype: torch.dtype, checkpointing: str, bits: int) -> nn.Module:
    four: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    quantised = BitsAndBytesConfig(load_in_4bit=True, **four) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    model: Any = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype=dtype)
    if dtype == torch.float32:  # in bf16 it would cast norms and the head to fp32
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    set_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    return model.train()  # type: ignore[no-any-return]


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("built", ["in memory", "under Init"])
def test_a_loop_keeps_no_buffer(
    built: str, tier: str, dtype: torch.dtype, checkpointing: str, bits: int, folder: Path, tmp_path: Path
) -> None:
    """Steps, an evaluation, a generation of text and a state_dict, where every unit leaves its buffer after its use."""
    config = engine_config(tier, tier, folder=tmp_path, bf16=dtype == torch.bfloat16, prefetch_bytes=0, unit_size=1)
    make = partial(adapted, folder, dtype, checkpointing, bits)
    if built == "under Init":
        with infinity.Init(config):
            model: Any = make()
    else:
        model = make()
    with open_engine(model, config) as engine:
        losses = []
        for number in range(4):
            loss = engine(input_ids=TOKENS, labels=TOKENS).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number == 2:
                engine.eval()
                with torch.no_grad():
                    engine(input_ids=TOKENS, labels=TOKENS)
                    model.generate(input_ids=TOKENS[:, :4], max_new_tokens=2, do_sample=False)
                engine.train()
        saved = model.state_dict()
        model.save_pretrained(tmp_path / "adapter")
        assert not engine.parts.store.kept.warned
        assert losses[-1] < losses[0]
    expected = make().state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items() if "lora" not in name)


class Experts(nn.Module):
    """A layer with gradients before frozen layers of bitsandbytes, each of which takes some rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.experts = nn.ModuleList()
        for _ in range(4):
            weight = torch.randn(64, 64) / 8
            if kind == "int8":
                layer: Any = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
                layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            else:
                layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
                layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer)
            self.experts.append(layer.to("cpu"))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).split([len(x) - 1, 0, 1, 0])
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return (found - y).square().mean()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_experts_without_rows_keep_no_buffer(kind: str) -> None:
    """bitsandbytes keeps the weight of such a layer elsewhere than that of others."""
    batches = [(torch.randn(4, 64), torch.randn(4, 64)) for _ in range(3)]
    config = engine_config(prefetch_bytes=0, unit_size=1)
    expected = plain(seeded(partial(Experts, kind)), batches, config)
    with open_engine(seeded(partial(Experts, kind)), config) as engine:
        losses = train(engine, batches)
        assert not engine.parts.store.kept.warned
    assert losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("shape", [(2048, 1), (1, 2048)])
def test_codes_have_the_shape_of_the_view_that_they_replace(shape: tuple[int, int]) -> None:
    """bitsandbytes 0.49 keeps the transposed weight, and dequantises it into a transposed one; 0.50 the weight."""
    layer: Any = bnb.nn.Linear4bit(64, 64, bias=False)
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4", module=layer)
    weight = layer.to("cpu").weight
    codes = Codes.of(weight, torch.Size(shape))
    assert codes.shape == shape
    dequantise = bnb.functional.dequantize_4bit
    assert torch.equal(dequantise(codes, weight.quant_state), dequantise(weight.data.view(shape), weight.quant_state))
