"""Small mixtures of experts of `transformers`; tests that import this are skipped where it is not installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.optim import CPUAdam
from support.hugging_face import loss_of as loss_of_tokens
from support.loops import Batches, LossOf

transformers = pytest.importorskip("transformers")

EXPERTS, CHOSEN = 8, 3
"""Experts of a block, and those of a token. Sums of three or more depend on their order."""
_SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "pad_token_id": 0,
}  # fmt: skip


def config_of(name: str) -> Any:
    """Return the configuration of a small model of class `name`."""
    kind = getattr(transformers, name).config_class
    known = inspect.signature(kind).parameters
    return kind(**{field: value for field, value in _SHAPE.items() if field in known})


def made(name: str = "MixtralForCausalLM", implementation: str = "grouped_mm") -> nn.Module:
    model: Any = getattr(transformers, name)(config_of(name))
    model.set_experts_implementation(implementation)
    return model  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    return made()


MODELS: dict[str, Callable[[], nn.Module]] = {"mixtral": mixtral, "gpt_oss": lambda: made("GptOssForCausalLM")}


def batches(count: int, seed: int = 0, length: int = 12, few: bool = False) -> list[tuple[torch.Tensor]]:
    """Return tokens (2, length). few: only a few different tokens, so that experts stay without rows."""
    generator = torch.Generator().manual_seed(seed)
    last = 6 if few else 61
    return [(torch.randint(3 + seed, last + seed, (2, length), generator=generator) % 61,) for _ in range(count)]


def plain(
    model: nn.Module, steps: Batches, config: Config, loss_of: LossOf = loss_of_tokens
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by plain PyTorch, with the engine's optimizer. Return losses and the state dict."""
    params = config.optimizer.params
    optimizer = CPUAdam(model.parameters(), lr=params.lr, eps=params.eps, weight_decay=params.weight_decay)
    losses = []
    for batch in steps:
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}
