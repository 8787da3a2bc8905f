"""Reversible blocks: a function recomputes its inputs in backward, with a backward of its own for each block.

As Reformer does: no activations are saved, and the seed of each block is set again, so that dropout is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import VOCABULARY, Block, seeded, token_batches

WIDTH = 32


class Reversible(torch.autograd.Function):
    """(x, y) → (y, x + block(y)) for each block. seeds: one for each block, or none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, blocks: Sequence[nn.Module], seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.blocks, ctx.seeds = blocks, seeds
        for number, block in enumerate(blocks):
            if seeds:
                torch.manual_seed(seeds[number])
            x, y = y, x + block(y)
        ctx.save_for_backward(x.detach(), y.detach())
        return x, y

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, y = ctx.saved_tensors
        for number in reversed(range(len(ctx.blocks))):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                if ctx.seeds:
                    torch.manual_seed(ctx.seeds[number])
                output = ctx.blocks[number](leaf)
                output.backward(grad_y, retain_graph=True)
            x, y = y - output.detach(), x
            grad_x, grad_y = grad_y, grad_x + leaf.grad
        return grad_x, grad_y, None, None


class Stack(nn.Module):
    """Embedding, reversible blocks, head. dropout: of each block. shared: the blocks are two, each called three times,
    so that gradients of a parameter arrive several times.
    """

    def __init__(self, dropout: float, *, shared: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [nn.Sequential(Block(WIDTH), nn.Dropout(dropout)) for _ in range(2 if shared else 6)]
        self.blocks = nn.ModuleList(blocks * (6 // len(blocks)))
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)
        self.dropout = dropout

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        seeds = torch.randint(1 << 30, (6,)).tolist() if self.dropout else []
        x, y = Reversible.apply(x, x, self.blocks, seeds)  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.head(torch.cat([x, y], -1)).flatten(0, 1), targets.flatten())


def means(losses: Sequence[float], size: int) -> list[float]:
    return [sum(losses[start : start + size]) / size for start in range(0, len(losses), size)]


@pytest.mark.parametrize("way", ["loop", "train_batch"])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trains_as_a_plain_loop(dropout: float, shared: bool, update: str, way: str, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, unit_size=20_000, accumulation=3, update=update)
    batches = token_batches(12)

    def make() -> nn.Module:
        return Stack(dropout, shared=shared)

    model = seeded(make)
    torch.manual_seed(7)
    expected = plain(model, batches, config)
    model = seeded(make)
    with open_engine(model, config) as engine:
        torch.manual_seed(7)
        if way == "loop":
            losses = train(engine, batches)
        else:
            iterator = iter(batches)
            losses = [engine.train_batch(iterator).item() for _ in range(4)]  # as a loop: one function runs all blocks
            expected.losses = means(expected.losses, 3)
        result = Result(losses, parameters_of(engine))
        assert_nothing_leaked(engine)
    assert_close(result, expected)
