"""Code of the processes whose memory tests/memory/test_construction.py measures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import infinity
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.tiers.device import CpuDevice
from support.configs import engine_config


def model(layers: int) -> nn.Module:
    """A block has 1.2 M parameters, 4.9 MB in fp32; the embeddings have 0.1 M."""
    return GPT2(GPT2Config(256, seq_length=64, num_layers=layers, hidden_size=320, num_attention_heads=5))


def on_meta(layers: int) -> nn.Module:
    with torch.device("meta"):
        return model(layers)


def start(made: nn.Module, folder: str) -> None:
    """Move the values of a model to nvme."""
    with infinity.initialize(made, config(folder), device=CpuDevice())[0] as engine:
        assert engine.ledger.tier_bytes()["host"] < 100e6


def config(folder: str) -> Any:
    return engine_config(folder=folder, bf16=True, unit_size="4MiB", tile_size=1 << 18, moments="8bit", debug=False)


def with_init(layers: int, folder: str) -> None:
    with infinity.Init(config(folder)):
        made = model(layers)
    start(made, folder)


def from_meta(layers: int, folder: str) -> None:
    start(on_meta(layers), folder)


def from_files(layers: int, folder: str, weights: str) -> None:
    made = on_meta(layers)
    infinity.load_pretrained(made, weights)
    start(made, folder)


def as_ever(layers: int, folder: str) -> None:
    """Train a model that is built in memory, the baseline."""
    start(model(layers), folder)
