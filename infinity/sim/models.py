"""Models to plan for, without values: on the meta device, with the inputs of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.gpt2.model import GPT2, GPT2Config


@dataclass(frozen=True)
class PlannedModel:
    """A model without values."""

    name: str
    module: nn.Module
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    """Sequences → arguments of a forward that returns the loss, on the meta device."""
    sequence: int
    """Tokens of a sequence."""


def gpt2(shape: GPT2Config) -> PlannedModel:
    """Return the demo's model of this shape."""
    with torch.device("meta"):
        module = GPT2(shape)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.zeros(batch, shape.seq_length, dtype=torch.int64, device="meta")
        return tokens, tokens

    return PlannedModel("GPT-2", module, inputs, shape.seq_length)


def of_transformers(folder: Path, *, sequence: int | None, checkpoint: bool) -> PlannedModel:
    """Return the causal language model that a folder's config.json of transformers describes.

    sequence: tokens; None: `max_position_embeddings`. checkpoint: recompute blocks in backward. Raises ConfigError if
    the folder has no such model or transformers is missing.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {folder}: cannot read {file} ({error}). Give a folder with a config.json."
        ) from error
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("--model needs transformers: pip install transformers") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigError(f"--model {folder}: {file} has no model_type. Give the config.json of a transformers model.")
    try:
        settings = AutoConfig.for_model(**content)
        with torch.device("meta"):
            module: nn.Module = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {folder}: transformers refuses {file}: {error}") from error
    module.float().train()
    settings.use_cache = False
    if checkpoint:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    length = sequence or int(getattr(settings, "max_position_embeddings", 0) or 1024)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, length, dtype=torch.int64, device="meta"),)

    return PlannedModel(str(content["model_type"]), _WithLoss(module), inputs, length)


class _WithLoss(nn.Module):
    """A language model that predicts its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss
