"""`model`, `dataset` and `engine.json` of docs/training.md."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return F.mse_loss(inputs, targets)


drive = {"device": "nvme", "nvme_path": "."}
config = {"train_batch_size": 4, "zero_optimization": {"offload_param": drive, "offload_optimizer": drive}}
Path("engine.json").write_text(json.dumps(config))
model = Model()
dataset = TensorDataset(torch.randn(16, 8), torch.randn(16, 8))


def before(block: int) -> None:
    """Close the engine of the block above: each constructs one for a new model."""
    if "engine" in globals():
        globals()["engine"].close()
        globals()["model"] = Model()
