"""GPT-2 without dropout, which `infinity plan` plans by default: the mathematics and parameter names of `transformers`.

Linear weights are (out, in) as in `nn.Linear`.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

Models to plan for, without values: on the meta device, with the inputs of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.deepspeed.settings import dtype_of
from infinity.errors import ConfigError
from infinity.inputs import parse_json, read_input
from infinity.nn import tile
from infinity.nn.loss import token_cross_entropy


@dataclass(frozen=True)
class GPT2Config:
    """The shape of the model. The defaults are GPT-2 small (124 M parameters)."""

    vocab_size: int = 50257
    seq_length: int = 1024
    """Longest sequence the model takes: the rows of the position embedding."""
    num_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    tie_word_embeddings: bool = True
    """The head multiplies by the token embedding; otherwise it has a weight of its own."""
    checkpoint_activations: bool = False
    """Keep only each block's input for backward and compute the rest again."""
    init_std: float = 0.02
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_length", "num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}: "
                "every head takes an equal part"
            )

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once."""
        c, block = self.hidden_size, 12 * self.hidden_size**2 + 13 * self.hidden_size
        embeddings = (self.vocab_size + self.seq_length) * c + (0 if self.tie_word_embeddings else self.vocab_size * c)
        return embeddings + self.num_layers * block + 2 * c


class ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream: its weight starts smaller, so that the sum of all
    layers' contributions has the variance of one."""


class Attention(nn.Module):
    """Causal self-attention of all heads at once."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)  # queries, keys and values fused
        self.c_proj = ResidualLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        b, t, c = x.shape
        qkv = self.c_attn(x).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, C/H), views of one tensor
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with the tanh form of GELU between them (`gelu_new` in transformers)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.c_proj = ResidualLinear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT2(nn.Module):
    """The language model.

    It may be constructed on the meta device (`with torch.device("meta")`); whoever materialises a module's parameters
    then calls `initialize_module` on that module, in any order and one at a time.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.seq_length, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight
        self.apply(self.initialize_module)

    @torch.no_grad()
    def initialize_module(self, module: nn.Module) -> None:
        """Fill the parameters that `module` itself owns, from torch's CPU generator; its children are left alone."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            residual_layers = 2 * self.config.num_layers if isinstance(module, ResidualLinear) else 1
            module.weight.normal_(0.0, self.config.init_std / math.sqrt(residual_layers))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocab_size) of `input_ids` (B, T) int64, or their mean cross entropy in nats, fp32.

        `targets` (B, T) int64 asks for the latter: `targets[b, t]` is the token that follows `input_ids[b, t]`, that is
        already shifted; -100 is not counted.
        """
        t = input_ids.shape[1]
        if t > self.config.seq_length:
            raise ConfigError(
                f"a sequence of {t} tokens is longer than the model's seq_length {self.config.seq_length}"
            )
        x = self.wte(input_ids) + self.wpe(torch.arange(t, device=input_ids.device))
        for block in self.h:
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits if targets is None else token_cross_entropy(logits, targets)


_LARGEST_CONFIG = 16 << 20
"""Bytes of a config.json. Those of classifiers hold the names of their classes."""
_MOST_LAYERS = 10_000
WITH_COMPILER = 390_000_000
"""As `PlannedModel.process`, with torch's compiler, which transformers' Trainer and torch.utils.checkpoint import."""
_OF_CODE = ("auto_map", "kernel_config", "custom_pipelines")


@dataclass(frozen=True)
class PlannedModel:
    """A model without values."""

    name: str
    module: nn.Module
    inputs: Callable[[int], tuple[Any, ...] | dict[str, Any]]
    """Sequences → positional or keyword arguments of a forward that returns the loss, on the meta device."""
    sequence: int
    """Tokens of a sequence."""
    checkpointed: bool = False
    """True: blocks keep their inputs only, and backward recomputes them."""
    blocks: int = 0
    with_blocks: Callable[[int], PlannedModel] | None = None
    """Number of blocks → a model that differs in it only; None: not known."""
    process: int = 300_000_000
    """Resident bytes of a process that trains it, without the engine, on a CPU: with torch 2.13, 266 MB were measured
    for small layers, and up to 32 MB more for attention."""
    of_files: int = 75_000_000
    """Bytes of `process` that are pages of library files."""
    dtype: torch.dtype = torch.float32
    """That of its parameters in the user's script. They are in fp32 here."""
    measured_with: str = ""
    """Libraries of the process that was measured here; empty: the bytes are assumed."""


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
    dtype = dtype_of(module)
    module.float()
    if tile_bytes is not None:
        tile(module, tile_bytes)
    found = language_model(str(content["model_type"]), module, sequence=sequence, checkpoint=checkpoint)
    return replace(found, dtype=dtype)


def language_model(name: str, module: nn.Module, *, sequence: int | None, checkpoint: bool) -> PlannedModel:
    """Return a causal language model of transformers, or one that wraps it, with tokens as inputs.

    Arguments are those of `of_transformers`. Raises ConfigError if it cannot recompute blocks.
    """
    settings: Any = module.config
    settings.use_cache = False
    if checkpoint:
        try:
            # Its name since transformers 5.24; the older one warns there.
            own: Any = module
            enable = getattr(own, "activation_checkpointing_enable", None) or own.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"--checkpoint-activations: {name} does not support it ({error}).") from error
    length = sequence or int(getattr(settings, "max_position_embeddings", 0) or 1024)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, length, dtype=torch.int64, device="meta"),)

    return PlannedModel(name, _WithLoss(module.train()), inputs, length, checkpoint, process=WITH_COMPILER)


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
        self.config = model.config

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss
