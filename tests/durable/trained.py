"""Script of a durable training, started as one process or by torchrun: writes each step's loss, and the parameters.

arguments: JSON with `folder`, `steps`, `durable`, and optionally {"at": step, "rank": rank, "signal": number, "once":
file} to send this process a signal in a step's forward, the first time only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks)


def config(folder: str, durable: bool) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"durable": durable, "unit_size": "8KB"},
    }


def train(folder: str, steps: int, durable: bool, send: dict[str, Any] | None = None) -> None:
    """Write FOLDER/losses-RANK, lines of step, loss and number of torchrun's restart, and FOLDER/values-RANK.pt."""
    rank = int(os.environ.get("RANK", 0))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    engine, *_ = infinity.initialize(model=model(), config=config(folder, durable))
    torch.manual_seed(5 + rank)
    state = engine.resume() or {"next": 0}
    for step in range(state["next"], steps):
        if send is not None and (step, rank) == (send["at"], send["rank"]) and not os.path.exists(send["once"]):
            Path(send["once"]).touch()
            os.kill(os.getpid(), send["signal"])
        batch = torch.randn(2, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(batch.to(next(engine.module.parameters()).dtype)).square().mean()
        engine.backward(loss)
        with open(f"{folder}/losses-{rank}", "a") as file:
            file.write(f"{step} {loss.item().hex()} {restart}\n")
        engine.step(client_state={"next": step + 1})
    values = {name: value.clone() for name, value in engine.state_dict().items()}
    torch.save(values, f"{folder}/values-{rank}.pt")
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
