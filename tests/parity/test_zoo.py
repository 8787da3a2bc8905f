"""A zoo of unmodified `transformers` models, everything on nvme: experts, two stacks, classifiers, images and sound.

GPT-2, Llama, DeBERTa and ALBERT, with and without checkpointing, are in tests/units/test_transformers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.configs import engine_config
from support.hugging_face import LENGTH, VOCABULARY, bert, t5, transformers
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import seeded

STEPS, BATCH = 5, 2
Inputs = dict[str, torch.Tensor]


def tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


@dataclass(frozen=True)
class Animal:
    """Makes a model and a batch for it, with the least number of units for `unit_size`."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Inputs]
    units: int


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2, image_size=16, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=8,
        max_target_positions=LENGTH, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def labelled(key: str, inputs: torch.Tensor, generator: torch.Generator) -> Inputs:
    return {key: inputs, "labels": torch.randint(3, (BATCH,), generator=generator)}


ZOO = {
    "mixtral": Animal(mixtral, lambda g: (lambda x: {"input_ids": x, "labels": x})(tokens(g)), 6),
    "t5": Animal(t5, lambda g: {"input_ids": tokens(g), "labels": tokens(g, 7)}, 7),
    "bert": Animal(bert, lambda g: labelled("input_ids", tokens(g), g), 6),
    "vit": Animal(vit, lambda g: labelled("pixel_values", torch.randn(BATCH, 3, 16, 16, generator=g), g), 6),
    "whisper": Animal(
        whisper, lambda g: {"input_features": torch.randn(BATCH, 8, 16, generator=g), "labels": tokens(g, 7)}, 7
    ),
}


def loss_of(model: Any, batch: tuple[Inputs]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch[0]).loss
    return loss


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ZOO)
def test_trains_as_a_plain_loop(name: str, clip: float, tmp_path: Path) -> None:
    """Losses are within 1e-6 relative, all parameters together within 1e-5."""
    animal = ZOO[name]
    generator = torch.Generator().manual_seed(5)
    batches = [(animal.batch(generator),) for _ in range(STEPS)]
    config = engine_config(
        folder=tmp_path, unit_size=60_000, prefetch_bytes=40_000, weight_decay=0.1, clip=clip, eps=1e-6
    )
    expected = plain(seeded(lambda: animal.make().train()), batches, config, loss_of)
    with open_engine(seeded(lambda: animal.make().train()), config) as engine:
        assert len(engine.units) >= animal.units > 5
        losses = train(engine, batches, loss_of)
        result = Result(losses, parameters_of(engine))
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)
    assert_close(result, expected)
