"""Fits, tests and resumes a LightningModule: `torchrun … lightning_deepspeed_script.py STRATEGY FOLDER RANKS`.

STRATEGY: ddp, or deepspeed for Lightning's own DeepSpeedStrategy in stage 3, over infinity.deepspeed. Each rank writes
what it observed to FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary

from integrations.lightning_module import loader, module, trainer


class OnCPU(DeepSpeedStrategy):  # type: ignore[misc]
    """Lightning's strategy without its checks of CUDA devices."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def main(strategy: str, folder: Path, ranks: int) -> None:
    """Fit two epochs, test the model as it is and from its checkpoint, and resume from that for two more epochs."""
    torch.set_num_threads(1)

    def runner(**options: Any) -> Any:
        return trainer(folder, "ddp" if strategy == "ddp" else OnCPU(stage=3), devices=ranks, **options)

    saving = pl.callbacks.ModelCheckpoint(folder / strategy, monitor="held_out", filename="best")
    first, second = module(), module()
    fitting = runner(callbacks=[saving], enable_checkpointing=True, enable_model_summary=True)
    fitting.fit(first, loader(), loader())
    seen: dict[str, Any] = {"losses": first.losses, "held_out": first.held_out, "best": float(saving.best_model_score)}
    if strategy == "deepspeed":
        summary = DeepSpeedSummary(first)
        seen["sizes"] = (summary.total_parameters, summary.trainable_parameters, sum(summary.parameters_per_layer))
    seen["tested"] = runner().test(first, loader(), verbose=False)[0]["tested"]
    best = saving.best_model_path
    seen["loaded"] = runner().test(module(), loader(), ckpt_path=best, verbose=False)[0]["tested"]
    runner(max_epochs=4).fit(second, loader(), loader(), ckpt_path=best)
    seen["resumed"] = second.losses
    torch.save(seen, folder / f"{strategy}{fitting.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
