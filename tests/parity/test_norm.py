"""The gradient norm: bit-identical at any place and time of computation, and correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.tiers.device import CpuDevice, Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine, train
from support.models import Stack, seeded, token_batches

STEPS = 3


def norms(
    folder: Path, device: Device | None = None, accumulation: int = 1, clip: float = 0.3, **options: Any
) -> list[float | None]:
    config = engine_config(folder=folder, accumulation=accumulation, clip=clip, **options)
    found = []
    with open_engine(seeded(lambda: Stack(width=48, depth=4, tied=True)), config, device) as engine:
        for step in range(STEPS):
            train(engine, token_batches(accumulation, seed=step))
            found.append(engine.get_global_grad_norm())
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_it_is_the_same_on_arrival_and_later(bf16: bool, accumulation: int, tmp_path: Path) -> None:
    """The norm is computed as gradients arrive on the CPU, and after they are complete on a device."""
    options: dict[str, Any] = {"bf16": bf16, "accumulation": accumulation}
    expected = norms(tmp_path, CpuDevice(), **options)
    assert None not in expected and len(set(expected)) == STEPS
    for optim in ("none", "cpu", "nvme"):
        assert norms(tmp_path, LateDevice(delay=0.005), optim=optim, **options) == expected, optim
    for other in ({"adam_threads": 3}, {"tile_size": 8192}, {"update": "after_backward"}, {"optim": "cpu"}):
        assert norms(tmp_path, **options, **other) == expected, other


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_is_the_same_without_clipping(accumulation: int, tmp_path: Path) -> None:
    """Backward has updated units in some schedules, and the norm includes their gradients."""
    options: dict[str, Any] = {"accumulation": accumulation, "clip": 0.0}
    expected = norms(tmp_path, update="next_forward", **options)
    assert None not in expected and len(set(expected)) == STEPS
    for other in ({"optim": "cpu"}, {"check_nan": False}, {"update": "after_backward"}, {"stage": 0, "param": "none"}):
        assert norms(tmp_path, **options, **other) == expected, other
    assert norms(tmp_path, LateDevice(delay=0.005), optim="none", **options) == expected


def test_it_is_that_of_torch(tmp_path: Path) -> None:
    [norm, *_] = norms(tmp_path)
    model = seeded(lambda: Stack(width=48, depth=4, tied=True))
    [batch] = token_batches(1, seed=0)
    model(*batch).backward()
    expected = nn.utils.get_total_norm([p.grad.double() for p in model.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(expected), rel=1e-6)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return part of the parameters of most units."""
    return [parameter for parameter in model.get_submodule("blocks").parameters() if parameter.dim() > 1]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("norm_of", ["model", "optimizer"])
def test_it_covers_the_model_or_the_optimizers_groups(norm_of: str, accumulation: int, tmp_path: Path) -> None:
    """Trainable parameters in no group count with "model" only, wherever the norm is computed."""
    plain = seeded(Stack)
    for batch in token_batches(accumulation):
        (plain(*batch) / accumulation).backward()
    counted = matrices(plain) if norm_of == "optimizer" else list(plain.parameters())
    expected = float(nn.utils.get_total_norm([p.grad.double() for p in counted if p.grad is not None]))
    found = set()
    for device, optim in ((CpuDevice(), "none"), (CpuDevice(), "nvme"), (LateDevice(), "none"), (LateDevice(), "cpu")):
        model = seeded(Stack)
        config = engine_config(optim=optim, folder=tmp_path, accumulation=accumulation, clip=1e9, norm_of=norm_of)
        with TrainingEngine(model, config, matrices(model), device=device) as engine:
            train(engine, token_batches(accumulation))
            found.add(engine.get_global_grad_norm())
    assert len(found) == 1 and found.pop() == pytest.approx(expected, rel=1e-6)


class Crossed(nn.Module):
    """A model with a gradient of unusual strides, and one that arrives transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 40, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (self.weight.t() * x.float().mean()).pow(3).sum()


def test_gradients_with_strides(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, clip=1e9)
    batch = token_batches(1)[0]
    with open_engine(Crossed(), config) as engine:
        train(engine, [batch])
        norm = engine.get_global_grad_norm()
    model = Crossed()
    model(*batch).backward()
    assert model.weight.grad is not None
    assert norm == pytest.approx(float(model.weight.grad.double().norm()), rel=1e-6)
