"""Trains a small model on every rank of a job, saves checkpoints, and goes on from the last one.

sbatch examples/slurm/train.sbatch --checkpoints /shared/checkpoints
torchrun --nproc-per-node 2 examples/slurm/train.py --checkpoints checkpoints
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import infinity


def config(nvme_path: str, host_memory: str) -> dict[str, object]:
    drive = {"device": "nvme", "nvme_path": nvme_path}
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        # "auto": states stay in host memory, within the job's limit, as far as there is room.
        "infinity": {"memory": {"host": host_memory}},
    }


def seen_by_rank_0(file: Path | None, device: torch.device) -> bool:
    """Return the same on all ranks, which save together."""
    seen = torch.tensor(file is not None and file.exists(), dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.broadcast(seen, 0)
    return bool(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all nodes share")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder for the states")
    parser.add_argument("--host-memory", default="auto", help="infinity.memory.host: host memory of a node for states")
    parser.add_argument("--stop-file", type=Path, help="save and end when this file appears")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(256, 1))
    engine, *_ = infinity.initialize(model=model, config=config(args.nvme_path, args.host_memory))
    with engine:
        if (args.checkpoints / "latest").exists():
            engine.load_checkpoint(args.checkpoints)
        stop = False
        while engine.global_steps < args.steps and not stop:
            # Each rank's own part of the data, by the number of the step: the same after a restart.
            generator = torch.Generator().manual_seed(engine.global_steps * ranks + rank)
            inputs = torch.randn(16, 256, generator=generator).to(engine.device)
            loss = nn.functional.mse_loss(engine(inputs), inputs[:, :8].sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()
            step = engine.global_steps
            if rank == 0:
                print(f"step {step}: loss {loss.item():.9g}", flush=True)
            stop = seen_by_rank_0(args.stop_file, engine.device)
            if stop or step % args.save_every == 0 or step == args.steps:
                engine.save_checkpoint(args.checkpoints)


if __name__ == "__main__":
    main()
