"""Small models of `transformers`; tests that import this are skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 67, 12
_GENERATOR = torch.Generator().manual_seed(5)
BATCHES = [(torch.randint(3, VOCABULARY, (2, LENGTH), generator=_GENERATOR),) for _ in range(5)]


def gpt2() -> nn.Module:
    """Its head is its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")


def llama() -> nn.Module:
    """Its head is its own."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def t5() -> nn.Module:
    """Encoder and decoder share their embedding with the head."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    """A classifier."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2,
        max_position_embeddings=LENGTH, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss
