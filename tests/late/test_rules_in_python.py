"""Rules in Python compute on the late device, whatever the tier of their states, with the bits of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.tiers.device import CpuDevice
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import parameters_of, train
from support.models import Stack, seeded, token_batches
from support.rules import OPTIMIZERS
from support.states import states_of

STEPS = 3


def trained(kind: str, device: Any, config: Any) -> dict[str, torch.Tensor]:
    model = seeded(Stack)
    batches = [tuple(t.to(device.torch_device) for t in batch) for batch in token_batches(STEPS)]
    with infinity.initialize(model, config, optimizer=OPTIMIZERS[kind](model), device=device)[0] as engine:
        train(engine, batches)
        return {name: value.cpu() for name, value in (parameters_of(engine) | states_of(engine)).items()}


@pytest.mark.parametrize("kind", ["NAdam", "Muon", "Adafactor", "a user's"])
@pytest.mark.parametrize(("param", "optim"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme")])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_trains_as_on_the_cpu(order: None, kind: str, param: str, optim: str, bf16: bool, tmp_path: Path) -> None:
    config = engine_config(param, optim, folder=tmp_path, bf16=bf16)
    found = trained(kind, LateAccelerator(0), config)
    expected = trained(kind, CpuDevice(), engine_config(folder=tmp_path, bf16=bf16))
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]
