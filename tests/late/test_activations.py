"""Saved activations leave the late device and come back in every order of execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import late
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import open_engine, train, trained
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(4, batch=4, length=16)
OPTIONS = {"bf16": True, "clip": 0.5, "prefetch_bytes": 20_000}


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, x, use_reentrant=True)
    return out


@pytest.mark.parametrize("run", [None, reentrant], ids=["plain", "reentrant"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_training_has_the_same_bits(order: None, tier: str, run: Any) -> None:
    def make() -> Stack:
        return seeded(lambda: Stack(32, run=run))

    expected = trained(make(), BATCHES, engine_config("cpu", "cpu", **OPTIONS))
    device = LateAccelerator(0)
    section = {"device": tier, "nvme_path": "/dev/shm", "min_bytes": 256, "memory_bytes": 16384}
    config = engine_config("cpu", "cpu", activations=section, **OPTIONS)
    batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
    with open_engine(make(), config, device) as engine:
        assert train(engine, batches) == expected.losses
        moved = engine.ledger.snapshot()
        assert moved.activation_bytes_written > 50_000 and moved.activation_bytes_read > 0
    late.drain()


def test_the_same_host_memory_serves_every_step(lazy: None) -> None:
    device = LateAccelerator(0)
    section = {"device": "cpu", "min_bytes": 256, "memory_bytes": 16384}
    batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", activations=section, **OPTIONS), device) as engine:
        train(engine, batches[:2])
        room = engine.parts.activations.room
        before = room.nbytes
        train(engine, batches)
        assert 0 < room.nbytes <= 1.2 * before
