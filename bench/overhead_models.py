"""Models of many tiny units, for `overhead.py`: a unit costs little beside what the engine does for it."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 16
"""A Linear(16, 16) without bias: 1 kB."""


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))


class Units(nn.Module):
    """`size` units, each used once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = linears(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Parameters(nn.Module):
    """`size` parameters in one unit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat(list(self.weights)) * x.sum()).square().mean()


class Cell(nn.Module):
    """Alternates between the cell's two units, `size` times; the layers before and after it are used once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.ends = linears(2)
        self.cell = linears(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x = self.ends[0](x)
        for _ in range(self.size):
            state = torch.tanh(self.cell[0](x) + self.cell[1](state))
        end: torch.Tensor = self.ends[1](state).square().mean()
        return end


MODELS = {"units": Units, "parameters": Parameters, "cell": Cell}


def build(kind: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """A model with small weights, and its batch."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind](size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    return model, torch.randn(4, WIDTH)
