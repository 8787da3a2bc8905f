"""`infinity.Init` around models of `transformers`, whose `post_init` goes over all modules again, and ties some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.hugging_face import BATCHES, bert, gpt2, llama, loss_of, t5
from support.loops import train
from support.mapped import kept
from support.models import seeded
from support.states import states_of

MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}


def config(folder: Path, bf16: bool = False) -> Any:
    return engine_config(folder=folder, unit_size=4096, bf16=bf16)


def started(model: nn.Module, folder: Path, bf16: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """All states that an engine starts with, and the losses of its first steps."""
    with infinity.initialize(model, config(folder, bf16), device=CpuDevice())[0] as engine:
        values = states_of(engine) | engine.state_dict()
        return values, train(engine, BATCHES[:2], loss_of) if hasattr(model, "lm_head") else []


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_starts_as_ordinary_construction(name: str, bf16: bool, tmp_path: Path) -> None:
    expected, losses = started(seeded(MODELS[name]), tmp_path, bf16)
    with infinity.Init(config(tmp_path, bf16)):
        model = seeded(MODELS[name])
    assert kept(model.parameters()) > 0.7
    values, found = started(model, tmp_path, bf16)
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    assert found == losses


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained(name: str, tmp_path: Path) -> None:
    """Builds on the meta device, and puts what it reads in place of that."""
    source: Any = seeded(MODELS[name], 1)
    source.save_pretrained(tmp_path / "saved")
    with infinity.Init(config(tmp_path)):
        model = type(source).from_pretrained(tmp_path / "saved")
    mine, theirs = model.state_dict(), source.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
    del mine, theirs  # their memory is the parameters', which initialize refuses
    expected, losses = started(source, tmp_path, False)
    values, found = started(model, tmp_path, False)
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    assert found == losses
