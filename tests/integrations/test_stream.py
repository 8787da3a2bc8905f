"""`infinity.stream_weights` of models with peft's adapters yields the bits of `merge_and_unload()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

for library in ("transformers", "peft"):
    pytest.importorskip(library, reason="make test-integrations installs it")

import peft  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed  # noqa: E402
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM  # noqa: E402

import infinity  # noqa: E402
from infinity.engine.training import TrainingEngine  # noqa: E402
from infinity.errors import ModelError  # noqa: E402
from infinity.tiers.device import CpuDevice  # noqa: E402
from support.configs import engine_config  # noqa: E402
from support.loops import open_engine  # noqa: E402
from support.ranks import Group  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
TOKENS = torch.arange(16).view(2, 8)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(**options: Any) -> nn.Module:
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **options))


def gpt2() -> nn.Module:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))


def mixtral() -> nn.Module:
    set_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))


class Images(nn.Module):
    """Convolutions over an embedding: tokens (batch, 8) → a loss."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.one = nn.Conv1d(16, 8, 3, padding=1)
        self.two = nn.Conv2d(1, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 3, groups=groups)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        x = self.one(self.embed(input_ids).mT)
        return {"loss": self.wide(self.two(x[:, None])).square().mean()}


def linear(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj", "up_proj"], **options})


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (llama, linear()),
    "rslora": (llama, linear(use_rslora=True, bias="all")),
    "bias": (lambda: llama(attention_bias=True), linear(target_modules=["q_proj"], lora_bias=True)),
    "dora": (llama, linear(use_dora=True)),
    "pissa": (llama, linear(init_lora_weights="pissa")),
    "embedding": (llama, linear(target_modules=["q_proj", "embed_tokens"])),
    "dora of an embedding": (llama, linear(target_modules=["embed_tokens"], use_dora=True)),
    "tied": (lambda: llama(tie_word_embeddings=True), linear(target_modules=["q_proj", "embed_tokens"])),
    "conv1d of gpt2": (gpt2, linear(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "saved modules": (llama, linear(modules_to_save=["lm_head", "norm"])),
    "convolutions": (Images, linear(target_modules=["one", "two", "wide", "embed"])),
    "experts": (
        mixtral,
        linear(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    ),
}


def engine_of(model: nn.Module, folder: Path, **options: Any) -> TrainingEngine:
    return open_engine(model, engine_config(folder=folder, unit_size=4096, prefetch_bytes=0, micro=2, **options))


def running(model: nn.Module, folder: Path) -> infinity.InferenceEngine:
    return infinity.init_inference(model, engine_config(folder=folder, unit_size=4096), device=CpuDevice())


def train(engine: TrainingEngine, steps: int = 2) -> None:
    for _ in range(steps):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS)["loss"])
        engine.step()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [{"param": "nvme"}, {"param": "cpu", "bf16": True}, {"param": "none", "stage": 2}])
def test_merged_weights_have_the_bits_of_peft(case: str, place: dict[str, Any], tmp_path: Path) -> None:
    """The model keeps its values and adapters, and a stream without the merge has its own names."""
    make, config = CASES[case]
    model: Any = peft.get_peft_model(make(), config)
    engine = engine_of(model, tmp_path, lr=0.01, **place)
    train(engine)
    before = engine.state_dict()
    merged = dict(infinity.stream_weights(engine))
    for again in (engine.state_dict(), dict(infinity.stream_weights(engine, merge_adapters=False))):
        assert again.keys() == before.keys()
        assert all(torch.equal(again[name], value) for name, value in before.items())
    some = [name for name in merged if "norm" in name or "q_proj" in name or "wide" in name]
    assert set(dict(infinity.stream_weights(engine, some))) == set(some)
    train(engine, 1)
    merged = dict(infinity.stream_weights(engine))
    engine.close(restore=True)
    plain = {name: value.clone() for name, value in make().state_dict().items()}
    expected = model.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys() == plain.keys()
    assert all(torch.equal(merged[name], value) for name, value in expected.items())
    assert any(not torch.equal(value, plain[name].to(value.dtype)) for name, value in merged.items())


def test_the_active_adapter_is_merged(tmp_path: Path) -> None:
    """A layer that is merged already keeps its weight."""
    model: Any = peft.get_peft_model(llama(), linear(init_lora_weights=False))
    model.add_adapter("other", linear(init_lora_weights=False, r=2))
    model.set_adapter("other")
    merged = peft.get_peft_model(llama(), linear(init_lora_weights=False))
    merged.base_model.merge_adapter()
    for each in (model, merged):
        with running(each, tmp_path) as engine:
            values = dict(infinity.stream_weights(engine, dtype=torch.bfloat16))
            engine.close(restore=True)
        expected = each.merge_and_unload().state_dict()
        assert all(torch.equal(values[name], value.to(torch.bfloat16)) for name, value in expected.items())


def test_a_mixed_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model: Any = peft.get_peft_model(llama(), linear(init_lora_weights=False), mixed=True)
    with running(model, tmp_path) as engine:
        values = dict(infinity.stream_weights(engine))
        engine.close(restore=True)
    expected = model.merge_and_unload().state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def tiled() -> nn.Module:
    model = llama()
    assert infinity.nn.tile(model, 512)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "ia3": (llama, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "q_proj is a peft.tuners.ia3"),
    "prompts": (llama, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "has .* prompts"),
    "alora": (llama, linear(alora_invocation_tokens=[1]), "q_proj has adapters of the variant ALora"),
    "tokens": (llama, linear(trainable_token_indices=[1, 2]), "embed_tokens is a TrainableTokensWrapper"),
    "groups": (lambda: Images(2), linear(target_modules=["wide"]), "wide is a convolution in 2 groups"),
    "tiles": (tiled, linear(target_modules="all-linear"), r"tiles\.0 is cut into tiles, or is a tile,"),
    "bias": (llama, linear(lora_bias=True), "with a bias, and its base layer has none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_peft_cannot_merge_are_refused_by_name(case: str, tmp_path: Path) -> None:
    make, config, text = REFUSED[case]
    model = peft.get_peft_model(make(), config)
    with running(model, tmp_path) as engine:
        with pytest.raises(ModelError, match=f"{text}.*pass merge_adapters=False"):
            next(infinity.stream_weights(engine))
        assert dict(infinity.stream_weights(engine, merge_adapters=False)).keys() == model.state_dict().keys()


def test_disabled_adapters_are_refused(tmp_path: Path) -> None:
    model: Any = peft.get_peft_model(llama(), linear())
    with engine_of(model, tmp_path) as engine:
        with model.disable_adapter(), pytest.raises(ModelError, match="are disabled"):
            next(infinity.stream_weights(engine))
        assert dict(infinity.stream_weights(engine))


def test_two_ranks_merge_alike(tmp_path: Path) -> None:
    """A rank that stops early, when adapters and base are in different units, stops no other collective."""
    from integrations import stream_cases

    group = Group(2)
    try:
        for stage, param in ((3, "nvme"), (0, "none")):
            found = group.run(stream_cases.merged, folder=str(tmp_path), stage=stage, param=param)
            assert ("rank 1 stopped reading" in found[0]["raised"]) == (stage == 3)
            assert not found[1]["raised"]
            for seen in found:
                assert stream_cases.same(seen["values"], seen["state"])
                assert stream_cases.same(seen["values"], found[0]["values"])
    finally:
        group.stop()
