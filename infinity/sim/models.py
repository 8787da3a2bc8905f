"""Models to plan for, without values: on the meta device, with the inputs of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.inputs import parse_json, read_input
from infinity.nn.replace import tile
from infinity.sim.gpt2 import GPT2, GPT2Config, ResidualLinear

_LARGEST_CONFIG = 16 << 20
"""Bytes of a config.json. Those of classifiers hold the names of their classes."""
_MOST_LAYERS = 10_000
_OF_CODE = ("auto_map", "kernel_config", "custom_pipelines")


@dataclass(frozen=True)
class PlannedModel:
    """A model without values."""

    name: str
    module: nn.Module
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    """Sequences → arguments of a forward that returns the loss, on the meta device."""
    sequence: int
    """Tokens of a sequence."""
    checkpointed: bool = False
    """True: blocks keep their inputs only, and backward recomputes them."""
    blocks: int = 0
    with_blocks: Callable[[int], PlannedModel] | None = None
    """Number of blocks → a model that differs in it only; None: not known."""


def gpt2(shape: GPT2Config, tile_bytes: int | None = None) -> PlannedModel:
    """Return the demo's model of this shape. tile_bytes: largest weight of a linear layer, as of `infinity.nn.tile`."""
    with torch.device("meta"):
        module = GPT2(shape)
    if tile_bytes is not None:
        for layer in module.modules():
            if type(layer) is ResidualLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment] # other initial values, which no plan has
        tile(module, tile_bytes)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.zeros(batch, shape.seq_length, dtype=torch.int64, device="meta")
        return tokens, tokens

    def with_blocks(count: int) -> PlannedModel:
        return gpt2(replace(shape, num_layers=count), tile_bytes)

    return PlannedModel(
        "GPT-2", module, inputs, shape.seq_length, shape.checkpoint_activations, shape.num_layers, with_blocks
    )


def of_transformers(
    folder: Path, *, sequence: int | None, checkpoint: bool, tile_bytes: int | None = None
) -> PlannedModel:
    """Return the causal language model that a folder's config.json of transformers describes.

    sequence: tokens; None: `max_position_embeddings`. checkpoint: recompute blocks in backward. tile_bytes: as of
    `gpt2`. Raises ConfigError if the folder has no such model or transformers is missing.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        content = parse_json(read_input(file, _LARGEST_CONFIG))
    except OSError as error:
        raise ConfigError(
            f"--model {folder}: cannot read {file} ({error.strerror or error}). Give a folder with a config.json."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--model {folder}: {file} is not valid JSON ({error}).") from error
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__
    except ImportError as error:
        raise ConfigError("--model needs transformers: pip install transformers") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigError(f"--model {folder}: {file} has no model_type. Give the config.json of a transformers model.")
    kind = content["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"--model {folder}: transformers {__version__} has no model of the model_type {kind!r} of {file}."
        )
    try:
        settings = AutoConfig.for_model(**_without_code(content))
        layers = getattr(settings, "num_hidden_layers", 0)
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise ConfigError(
                f"--model {folder}: {file} has {layers:,} layers. infinity plan accepts at most {_MOST_LAYERS:,}."
            )
        with torch.device("meta"):
            module: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, trust_remote_code=False
            )
    except ConfigError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"--model {folder}: transformers refuses {file}: {why:.300}") from error
    module.float().train()
    if tile_bytes is not None:
        tile(module, tile_bytes)
    settings.use_cache = False
    if checkpoint:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    length = sequence or int(getattr(settings, "max_position_embeddings", 0) or 1024)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, length, dtype=torch.int64, device="meta"),)

    return PlannedModel(str(content["model_type"]), _WithLoss(module), inputs, length, checkpoint)


def _without_code(config: Any) -> Any:
    """Return `config` without the keys, at any depth, with which it chooses code to download and run."""
    if isinstance(config, list):
        return [_without_code(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {
        key: _without_code(value)
        for key, value in config.items()
        if not key.startswith("_") and key not in _OF_CODE and not key.endswith("_implementation")
    }


class _WithLoss(nn.Module):
    """A language model that predicts its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss
