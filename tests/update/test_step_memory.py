"""Tensors that an optimizer's class makes in an update are in the plan, and count towards the limit of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.describe import describe
from infinity.errors import OutOfMemoryError
from infinity.optim.live_bytes import Allocations
from infinity.tiers.device import CpuDevice
from infinity.update import whole
from support.configs import engine_config
from support.loops import train
from support.models import Stack, seeded, token_batches
from support.rules import OPTIMIZERS, plain


class Plain(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def peaks_of(kind: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the most bytes that the operations of an update have allocated at once, and those of the plan."""
    peaks: list[int] = []
    update = whole._Parameter.update

    def measured(*args: Any) -> None:
        with Allocations() as made:
            update(*args)
        peaks.append(made.bytes.peak)

    monkeypatch.setattr(whole._Parameter, "update", measured)
    model = seeded(lambda: Stack(width=32, depth=3))
    with infinity.initialize(model, config, optimizer=OPTIMIZERS[kind](model), device=CpuDevice())[0] as engine:
        train(engine, token_batches(4))
        return max(peaks), engine.parts.plan.step_nbytes


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_updates_take_the_bytes_of_the_plan(
    kind: str, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most those, and nearly those: scalars differ, and without clipping fp32 gradients are used in their tile."""
    found, planned = peaks_of(kind, engine_config(folder=tmp_path, bf16=bf16, clip=0.1), monkeypatch)
    assert found <= planned <= found + 256


def test_a_class_that_makes_no_tensors_needs_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "plain", lambda model: [Plain(model.parameters(), {"lr": 0.1})])
    found, planned = peaks_of("plain", engine_config(folder=tmp_path, clip=0.1), monkeypatch)
    largest = max(p.numel() for p in Stack(width=32, depth=3).parameters())
    assert found == planned == 4 * largest


@torch.compile(backend="eager", fullgraph=True)
def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    x = gradient / (gradient.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


class Compiled(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = (
                    orthogonal(p.grad) if p.dim() == 2 else torch.cond(p.sum() > 0, torch.sin, torch.cos, (p.grad,))
                )
                p.add_(update, alpha=-group["lr"])


def test_a_step_that_compiles_trains_as_in_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting its tensors neither refuses it nor lets Dynamo skip its functions from then on."""
    monkeypatch.setitem(OPTIMIZERS, "compiled", lambda model: [Compiled(model.parameters(), {"lr": 0.02})])
    config, batches = engine_config(folder=tmp_path), token_batches(4)
    model = seeded(lambda: Stack(width=32, depth=3))
    expected = plain(seeded(lambda: Stack(width=32, depth=3)), OPTIMIZERS["compiled"], batches, config)
    with infinity.initialize(model, config, optimizer=OPTIMIZERS["compiled"](model), device=CpuDevice())[0] as engine:
        assert engine.parts.plan.step_nbytes > 0
        assert train(engine, batches) == expected.losses


def test_native_rules_take_none(tmp_path: Path) -> None:
    with infinity.initialize(Stack(), engine_config(folder=tmp_path))[0] as engine:
        assert engine.parts.plan.step_nbytes == 0
        assert "while the optimizer updates" not in describe(engine.parts.plan)


def test_the_limit_of_memory_counts_them(tmp_path: Path) -> None:
    """A limit that holds the states and buffers, and not the class's tensors, is refused with its bytes."""

    def opened(**options: Any) -> Any:
        model = seeded(lambda: Stack(width=64, depth=2))
        return infinity.initialize(
            model,
            engine_config(folder=tmp_path, **options),
            optimizer=torch.optim.Adadelta(model.parameters()),
            device=CpuDevice(),
        )[0]

    with opened() as engine:
        plan = engine.parts.plan
    needed = plan.peak_of_host()
    assert plan.step_nbytes > 0 and "more in host memory while the optimizer updates a parameter" in describe(plan)
    with opened(memory={"host": needed}):
        pass
    with pytest.raises(OutOfMemoryError, match=r"too little host memory"):
        opened(memory={"host": needed - 1})
