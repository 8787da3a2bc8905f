"""`model`, data, `Block` and `ds_config.json` of docs/coming_from.md."""

import json
from pathlib import Path

import torch
from torch import nn

import infinity

Path("ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}))
dataset = torch.randn(16, 8)
batches = [torch.randn(4, 8) for _ in range(2)]


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Squared(nn.Sequential):
    """A model whose output has a mean and, for scripts that take its output as the loss, one element."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).square().mean()


def before(block: int) -> None:
    """Bring a model without an engine."""
    global model
    model = Squared(*(Block() for _ in range(3)))


assert infinity.initialize
