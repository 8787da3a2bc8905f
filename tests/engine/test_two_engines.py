"""A policy that trains and a frozen reference in an engine of its own: values, budgets, and memory between phases."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from engine.test_offload import FreeingDevice
from infinity.engine import budget
from infinity.optim import CPUAdam
from infinity.tier_kind import TierKind
from infinity.tiers import memory
from infinity.tiers.device import CpuDevice, Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import open_engine
from support.models import seeded

STEPS = 5
WIDTH = 32


class Scorer(nn.Module):
    """(batch, width) → log probabilities (batch, width)."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x.log_softmax(-1)


def pairs() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, and the columns that are chosen and rejected."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, 0, WIDTH, (4, 1), generator=generator)
    return [(torch.randn(4, WIDTH, generator=generator), draw(), draw()) for _ in range(STEPS)]


def preference_loss(policy: Any, reference: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss of DPO: the reference runs between the policy's forward and its backward."""
    x, chosen, rejected = batch
    ours = policy(x)
    with torch.no_grad():
        theirs = reference(x)
    ratio = ours - theirs
    return -F.logsigmoid(0.5 * (ratio.gather(1, chosen) - ratio.gather(1, rejected))).mean()


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    policy, reference = seeded(Scorer), seeded(Scorer)
    params = engine_config().optimizer.params
    optimizer = CPUAdam(policy.parameters(), lr=params.lr, eps=params.eps, weight_decay=params.weight_decay)
    losses = []
    for batch in pairs():
        loss = preference_loss(policy, reference, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in policy.state_dict().items()}


def settings(tier: str, folder: Path, **infinity: Any) -> Any:
    return engine_config(tier, tier, folder=folder, unit_size=1000, prefetch_bytes=10_000, **infinity)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("device", [CpuDevice, partial(LateDevice, delay=0.01)], ids=["cpu", "late"])
def test_both_train_as_in_plain_pytorch(tier: str, device: Any, tmp_path: Path) -> None:
    """In one folder and one process, bit for bit; nothing of either remains."""
    losses, states = plain()
    config = settings(tier, tmp_path)
    shared: Device = device()
    with (
        open_engine(seeded(Scorer), config, shared) as policy,
        infinity.init_inference(seeded(Scorer), config, device=shared) as reference,
    ):
        found = []
        for batch in pairs():
            loss = preference_loss(policy, reference, batch)
            policy.backward(loss)
            policy.step()
            found.append(loss.item())
        assert found == losses
        trained, kept = policy.state_dict(), reference.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in states.items())
    assert all(torch.equal(kept[name], value) for name, value in seeded(Scorer).state_dict().items())
    assert not any(tmp_path.iterdir())


def test_auto_leaves_to_the_second_engine_what_the_first_has_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one keeps fewer parameters in host memory, and both plans fit into the machine together."""
    gc.collect()
    limit, before = 8_000_000, sum(len(mapping) for mapping in memory._alive)

    def left() -> int:
        gc.collect()
        return limit + before - sum(len(mapping) for mapping in memory._alive)

    monkeypatch.setattr(budget, "available_memory", left)
    build = partial(Scorer, 128, 64)
    config = settings("nvme", tmp_path, memory={"host": "auto"})
    with infinity.init_inference(seeded(build), config, device=CpuDevice()) as alone:
        most = alone.parts.plan.peak_of_host()
    with open_engine(seeded(build), config) as policy:
        assert left() < limit // 2 + 100_000
        with infinity.init_inference(seeded(build), config, device=CpuDevice()) as reference:
            plans = [engine.parts.plan.peak_of_host() for engine in (policy, reference)]
            assert plans[1] < most and sum(plans) <= limit
            assert left() >= 0
            x = torch.randn(2, 128)
            assert torch.equal(policy(x), reference(x))


def test_phases_have_the_device_to_themselves(tmp_path: Path) -> None:
    """While the reference runs, `offload_states` leaves none of the policy's states on the device, and both return."""
    device = FreeingDevice()
    config = settings("none", tmp_path)
    build = partial(Scorer, 128, 16)
    x = torch.randn(4, 128)
    with open_engine(seeded(build), config, device) as policy:

        def step() -> None:
            policy.backward(policy(x).square().mean())
            policy.step()

        step()
        held, states = sum(device.alive.values()), policy.parts.plan.placement.nbytes[TierKind.DEVICE]
        policy.offload_states()
        left = device.settled(held - states)
        assert left <= held - states
        device.most = 0
        with infinity.init_inference(seeded(build), config, device=device) as reference:
            reference(x)
            added = sum(device.alive.values()) - left
            assert device.most == left + added < held
        assert device.settled(left) == left
        policy.reload_states()
        step()
        assert device.most <= held
