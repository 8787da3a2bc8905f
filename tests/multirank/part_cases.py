"""Cases that ranks run in test_parts.py: parts of checkpoints, and memory that is freed between phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.engine.training import TrainingEngine
from multirank.cases import SAMPLES, global_batches, part
from support.configs import engine_config
from support.loops import open_engine, train
from support.models import Stack, seeded


def _frozen(seed: int) -> nn.Module:
    model: Any = seeded(Stack, seed)
    model.embedding.requires_grad_(False)
    return model


def parts_of_a_checkpoint(rank: int, *, folder: str, stage: int) -> dict[str, bool]:
    """Train, free and restore the memory, save parts, and load them. Returns what holds."""
    config = engine_config("none", "none", folder=folder, micro=SAMPLES, bf16=True, stage=stage)
    path = Path(folder)

    def steps(engine: TrainingEngine, begin: int, end: int) -> list[float]:
        batches = global_batches(end, SAMPLES * engine.ranks.size)[begin:]
        return train(engine, [part(batch, rank) for batch in batches])

    with open_engine(_frozen(0), config) as engine:
        steps(engine, 0, 2)
        engine.offload_states()
        engine.save_checkpoint(path / "saved", exclude_frozen_parameters=True)
        engine.reload_states()
        engine.save_16bit_model(path / "weights")
        expected = engine.state_dict()
        losses = steps(engine, 2, 4)
    with open_engine(_frozen(0), config) as engine:
        engine.load_checkpoint(path / "saved", load_module_strict=False)
        continues = steps(engine, 2, 4) == losses
        engine.load_checkpoint(path / "saved", load_module_strict=False, load_module_only=True)
        found = engine.state_dict()
    written = torch.load(path / "weights" / "pytorch_model.bin", weights_only=True)
    return {
        "continues": continues,
        "values": all(torch.equal(found[name], value) for name, value in expected.items()),
        "weights": all(torch.equal(written[name], value) for name, value in expected.items()),
    }
