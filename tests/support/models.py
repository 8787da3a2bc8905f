"""Small models that still make many units: repeated blocks are always units of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 61
Model = TypeVar("Model", bound=nn.Module)


class Block(nn.Module):
    """(batch, length, width) → the same; normalisation, two linear layers, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Embedding, blocks, head: (batch, length) tokens and targets → mean cross entropy.

    run: how a block is called, e.g. under checkpointing; by default plainly.
    """

    def __init__(
        self,
        width: int = 32,
        depth: int = 6,
        *,
        tied: bool = False,
        run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.run = run or (lambda block, x: block(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Linears(nn.Module):
    """A model of `nn.Linear` only, whose saved weights do not follow later assignments.

    (batch, width) and targets of that shape → mean squared error.
    """

    def __init__(self, width: int = 32, depth: int = 8, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x.float(), targets.float())


class Adapter(nn.Module):
    """A frozen linear layer with a trainable update of low rank, as LoRA adds it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(width: int = 32, depth: int = 4) -> Stack:
    """A frozen `Stack` with adapters around the linear layers of its blocks."""
    model = Stack(width, depth).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up, block.down = Adapter(block.up), Adapter(block.down)  # type: ignore[assignment]
    return model


def token_batches(
    count: int, *, batch: int = 4, length: int = 8, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, targets) pairs of shape (batch, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCABULARY, (batch, length), generator=generator) for _ in range(count)]
    return [(t, t.roll(-1, 1)) for t in tokens]


def vector_batches(
    count: int, *, batch: int = 4, width: int = 32, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, targets) pairs of shape (batch, width), fp32."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(2, batch, width, generator=generator) for _ in range(count)]
    return [(pair[0], pair[1]) for pair in draw]


def seeded(make: Callable[[], Model], seed: int = 0) -> Model:
    """Return `make()`, with the same initial values every time."""
    torch.manual_seed(seed)
    return make()
