"""A LightningModule for the tests, and a script: `torchrun … lightning_module.py STRATEGY FOLDER` writes its losses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):  # type: ignore[misc]
    """Three blocks and a head. Keeps its losses in lists."""

    def __init__(self, scheduler: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 1)
        self.scheduler = scheduler
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.held_out: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Uses the parts of the model, not its forward."""
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        loss = nn.functional.mse_loss(self.head(x), batch[1])
        self.held_out.append(loss.item())
        self.log("held_out", loss)

    def test_step(self, batch: Any, number: int) -> None:
        self.log("tested", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module(**options: Any) -> Regression:
    torch.manual_seed(0)
    return Regression(**options)


def loader() -> DataLoader[Any]:
    """Twelve batches of four."""
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
    return {"zero_optimization": zero, "infinity": {"unit_size": 4096}, **changes}


def trainer(folder: Path, strategy: Any = "auto", **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet["use_distributed_sampler"] = "devices" in options  # it shuffles
    settings = {"max_epochs": 2, "enable_checkpointing": False, "devices": 1, "default_root_dir": folder}
    return pl.Trainer(strategy=strategy, accelerator="cpu", **{**quiet, **settings, **options})


def main(strategy: str, folder: Path) -> None:
    """Train on two ranks, and write this rank's losses."""
    from infinity.integrations.lightning import InfinityStrategy

    torch.set_num_threads(1)
    ours = module()
    runner = trainer(folder, InfinityStrategy(config(folder)) if strategy == "ours" else strategy, devices=2)
    runner.fit(ours, loader(), loader())
    torch.save(ours.losses + ours.held_out, folder / f"{strategy}{runner.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
