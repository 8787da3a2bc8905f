"""GPT-2 without dropout, which `infinity plan` plans by default: the mathematics and parameter names of `transformers`.

Linear weights are (out, in) as in `nn.Linear`.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError
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
