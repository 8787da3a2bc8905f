"""Models train on the late device to the CPU's bits, in every order of execution."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import late

DEVICE = "late:0"


class Block(nn.Module):
    """(batch, length, width) → the same; attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """(batch, length) tokens and targets → mean cross entropy."""

    def __init__(self, width: int = 32, depth: int = 2, *, saving: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 61, bias=False)
        self.saving, self.dropout = saving, dropout

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saving else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


Trained = tuple[list[float], dict[str, torch.Tensor]]


def train(device: str, rule: Any = torch.optim.SGD, *, foreach: bool = False, **options: Any) -> Trained:
    torch.manual_seed(0)
    model = Transformer(**options).to(device)
    optimizer = rule(model.parameters(), lr=0.1, foreach=foreach)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 61, (2, 8))
        loss = model(tokens.to(device), tokens.roll(-1, 1).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], {name: value.cpu() for name, value in model.state_dict().items()}


def assert_same(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("saving", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_transformer_has_the_cpus_bits(order: None, saving: bool, dropout: float) -> None:
    expected = train("cpu", saving=saving, dropout=dropout)
    before = late.counters()
    assert_same(train(DEVICE, saving=saving, dropout=dropout), expected)
    after = late.counters()
    assert after.kernels_queued - before.kernels_queued > 300
    assert after.inference_failed == before.inference_failed


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_have_the_cpus_bits(order: None, rule: Any, foreach: bool) -> None:
    assert_same(train(DEVICE, rule, foreach=foreach), train("cpu", rule, foreach=foreach))


def test_backward_runs_on_a_thread_of_the_device_and_the_forwards_stream(lazy: None) -> None:
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((threading.get_ident(), torch.accelerator.current_stream()))
            return gradient * 2

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        loss = Seen.apply(x).sum()
    loss.backward()
    [(thread, used)] = seen
    assert thread != threading.get_ident() and used == stream
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


def test_autocast_casts_as_on_other_accelerators(order: None) -> None:
    layer, norm = nn.Linear(8, 8).to(DEVICE), nn.LayerNorm(8).to(DEVICE)
    with torch.autocast("late", dtype=torch.bfloat16):
        out = layer(torch.ones(2, 8, device=DEVICE))
        assert out.dtype == torch.bfloat16 and norm(out).dtype == torch.float32
    out.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
