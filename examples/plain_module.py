"""Trains a plain nn.Module with parameters and optimizer states on NVMe.

    python examples/plain_module.py --nvme-path /local_nvme

Without --nvme-path, states live in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn

import infinity


class Residual(nn.Module):
    """A stack of residual blocks. Repeated blocks, as in this list, become units that move between tiers."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Residual()
    offload = {"device": "nvme", "nvme_path": args.nvme_path}
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for step in range(1, args.steps + 1):
            inputs = torch.randn(64, 8)
            loss = nn.functional.mse_loss(engine(inputs), inputs.sin().sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
