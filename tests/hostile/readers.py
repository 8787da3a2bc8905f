"""Valid inputs, and the readers of the package that attacks meet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from hostile.attacks import STEP
from infinity.checkpoint.pretrained import load_pretrained
from infinity.cli.trace_file import read_trace
from infinity.config import Config
from infinity.deepspeed.importer.convert import read_deepspeed
from infinity.sim.gpt2 import of_transformers
from infinity.sim.machine import Links
from support.configs import engine_config
from support.loops import open_engine
from support.models import seeded

LINKS = {
    **dict.fromkeys(("nvme_read", "nvme_write", "nvme_mixed", "memory"), 1e9),
    **dict.fromkeys(("host_to_device", "device_to_host", "collective")),
    "flops": {"float32": 1e11},
    "baseline_rss": 1,
}
CONFIG = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
    "aio": {"queue_depth": 8},
    "infinity": {"unit_size": "1MB"},
}
TRACE = {
    "traceEvents": [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "compute"}},
        {
            "ph": "X",
            "pid": 0,
            "tid": 1,
            "name": "block",
            "ts": 1.0,
            "dur": 5.0,
            "args": {"bytes": 7, "thread": "model"},
        },
        {"ph": "C", "pid": 0, "name": "host bytes", "ts": 2.0, "args": {"bytes": 9}},
    ],
    "otherData": {"steps": [{"start": 0.0, "seconds": 1.0, "exposed": {"nvme_read": 0.5}}]},
}
MODEL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}


class Small(nn.Module):
    """Two linear layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def make_valid(folder: Path) -> None:
    """Write one valid input for each reader below `folder`."""
    with open_engine(seeded(Small), engine_config(unit_size=256)) as engine:
        engine.backward(engine(torch.ones(4, 8)))
        engine.step()
        engine.save_checkpoint(folder / "checkpoint", STEP, {"epoch": 3, "order": torch.arange(5), "text": b"\xff"})
    (folder / "pretrained").mkdir()
    save_file({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, folder / "pretrained" / "model.safetensors")
    source = Path(__file__).parents[1] / "integrations" / "deepspeed_checkpoints" / "stage0-fp32"
    shutil.copytree(source, folder / "deepspeed")
    (folder / "deepspeed" / "global_step3").rename(folder / "deepspeed" / STEP)
    (folder / "deepspeed" / "latest").write_text(STEP)
    for name, content in (("config", CONFIG), ("bandwidths", LINKS), ("trace", TRACE), ("model", MODEL)):
        (folder / name).write_text(json.dumps(content))


def checkpoint(path: Path) -> object:
    with open_engine(seeded(Small), engine_config(unit_size=256)) as engine:
        _, client_state = engine.load_checkpoint(path)
        torch.rand(1)
        return client_state


def pretrained(path: Path) -> object:
    return load_pretrained(nn.Linear(4, 4), path)


def deepspeed(path: Path) -> object:
    return read_deepspeed(path)


def config(path: Path) -> object:
    return Config.load(path)


def bandwidths(path: Path) -> object:
    return Links.read(path)


def trace(path: Path) -> object:
    return read_trace(path)


def model(path: Path) -> object:
    return of_transformers(path, sequence=8, checkpoint=False)


READERS: dict[str, Callable[[Path], object]] = {
    each.__name__: each for each in (checkpoint, pretrained, deepspeed, config, bandwidths, trace, model)
}
