"""The tier of a state never changes a result: all nine pairs of tiers are bit-identical."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.tiers.device import CpuDevice, Device
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateDevice
from support.loops import Result, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

STEPS = 4


def run(device: Device, folder: Path, param: str, optim: str, *, bf16: bool, accumulation: int, clip: float) -> Result:
    """Return the losses of `STEPS` steps, and the final parameters and optimizer states."""
    config = engine_config(param, optim, folder=folder, bf16=bf16, accumulation=accumulation, clip=clip)
    model = seeded(lambda: Stack(width=32, depth=4, tied=True))
    with open_engine(model, config, device) as engine:
        losses = train(engine, token_batches(STEPS * accumulation))
        held = {name for name, nbytes in engine.ledger.tier_bytes().items() if nbytes}
        assert {"none": "device", "cpu": "host", "nvme": "nvme"}[optim] in held
        return Result(losses, parameters_of(engine) | states_of(engine))


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
def test_every_pair(late: bool, bf16: bool, accumulation: int, clip: float, tmp_path: Path) -> None:
    """Losses, parameters, masters and moments are bit-identical, on the CPU and on a device with its own memory."""
    reference: Result | None = None
    for param, optim in PLACEMENTS:
        device = LateDevice(delay=0.01) if late else CpuDevice()
        result = run(device, tmp_path, param, optim, bf16=bf16, accumulation=accumulation, clip=clip)
        if reference is None:
            reference = result
            continue
        where = f"parameters on {param}, optimizer on {optim}"
        assert result.losses == reference.losses, where
        assert result.parameters.keys() == reference.parameters.keys()
        for name, value in result.parameters.items():
            assert torch.equal(value, reference.parameters[name]), f"{name}: {where}"
    assert reference is not None
    assert reference.losses[-1] == reference.losses[-1], "the loss is NaN"


def test_the_late_device_gives_what_the_cpu_gives(tmp_path: Path) -> None:
    options = {"bf16": True, "accumulation": 1, "clip": 0.0}
    one = run(CpuDevice(), tmp_path, "nvme", "nvme", **options)  # type: ignore[arg-type]
    other = run(LateDevice(delay=0.01), tmp_path, "nvme", "nvme", **options)  # type: ignore[arg-type]
    assert one.losses == other.losses
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
