"""A budget of memory never changes a result: states in any mixture of tiers give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.comm.communicator import Communicator
from infinity.engine.wiring import plan_model
from infinity.plan import pools
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.tiers import read_ahead, staging
from infinity.tiers.device import CpuDevice, Device
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.loops import Result, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

STEPS = 4
SHARES = (0.0, 0.3, 0.6, 1.0)
"""Share of the states on nvme that a budget holds beside the buffers."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging buffers as small beside the states as they are for large models; else a budget that has room for them
    would have room for all states.
    """
    for module in (pools, read_ahead, staging):
        monkeypatch.setattr(module, "STAGING_BYTES", 64 << 10)


def model() -> Stack:
    return seeded(lambda: Stack(width=48, depth=6, tied=True))


def planned(folder: Path, device: Device, **options: Any) -> Plan:
    config, stack = engine_config(folder=folder, **options), model()
    return plan_model(stack, config, [{"params": list(stack.parameters())}], device, Communicator(device)).plan


def mixture(plan: Plan) -> tuple[tuple[int, State, str], ...]:
    return tuple(sorted((*key, extent.tier) for key, extent in plan.placement.extents.items()))


def budgets(folder: Path, device: Device, **options: Any) -> list[int]:
    plan = planned(folder, device, **options)
    return [plan.peak_of_host() + int(share * plan.placement.nbytes["nvme"]) for share in SHARES]


def run(folder: Path, device: Device, memory: dict[str, float] | None = None, **options: Any) -> tuple[Result, Plan]:
    accumulation = options.get("accumulation", 1)
    config = engine_config(folder=folder, **options, **({"memory": memory} if memory else {}))
    with open_engine(model(), config, device) as engine:
        losses = train(engine, token_batches(STEPS * accumulation))
        return Result(losses, parameters_of(engine) | states_of(engine), len(engine.parts.units)), engine.parts.plan


@pytest.mark.parametrize("device", [CpuDevice, lambda: LateDevice(delay=0.002)], ids=["cpu", "late device"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.3},
        {"bf16": True, "accumulation": 3, "moments": "8bit", "tile_size": "auto"},
        {"bf16": True, "clip": 0.3, "moments": "bf16", "prefetch_bytes": 0},
        {"optim": "cpu", "bf16": True},
        {"param": "cpu", "clip": 0.3},
    ],
    ids=str,
)
def test_budgets(device: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, parameters, masters and moments are bit-identical over a sweep of budgets, with late disks as well."""
    use_late_disks(monkeypatch)
    seam = device()
    reference, plain = run(tmp_path, seam, **options)
    mixtures = set()
    for host in budgets(tmp_path, seam, **options):
        result, plan = run(tmp_path, seam, {"host": host}, **options)
        assert plan.peak_of_host() <= host
        mixtures.add(mixture(plan))
        assert result.losses == reference.losses, host
        for name, value in result.parameters.items():
            assert value.equal(reference.parameters[name]), (host, name)
    assert "nvme" in plain.placement.tiers(*State)
    assert "nvme" not in plan.placement.tiers(State.PARAM, State.OPTIM), "the largest budget holds all states"
    assert len(mixtures) >= 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.3},
        {"bf16": True, "accumulation": 3, "moments": "8bit", "tile_size": "auto"},
        {"bf16": True, "accumulation": 2, "clip": 0.3, "moments": "bf16", "prefetch_bytes": 0},
        {"param": "cpu", "bf16": True, "moments": "8bit", "clip": 0.3},
        {"param": "none", "update": "after_backward"},
        {"stage": 0, "param": "none", "bf16": True, "accumulation": 2},
        {"fp16": {"enabled": True, "initial_scale_power": 4}, "param": "cpu", "optim": "cpu"},
    ],
    ids=str,
)
def test_budgets_of_a_device(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and states are bit-identical with any share of the states on the device, from none to all."""
    use_late_disks(monkeypatch)
    seam = LateDevice(delay=0.002)
    options = {"param": "nvme", "optim": "cpu", **options}
    reference, plain = run(tmp_path, seam, **options)
    states = sum(extent.nbytes for extent in plain.placement.extents.values())
    buffers = plain.peak_nbytes()["device"]
    memories = [{"device": 2 * (buffers + int(share * states))} for share in (0.0, 0.4, 0.8, 2.0)]
    memories += [{"device_optimizer": share} for share in (0.3, 1.0)]
    memories += [{"device": 2 * (buffers + states // 3), "host": plain.peak_of_host() + states // 2}]
    mixtures = set()
    for memory in memories:
        result, plan = run(tmp_path, seam, memory, **options)
        mixtures.add(mixture(plan))
        assert result.losses == reference.losses, memory
        for name, value in result.parameters.items():
            assert value.equal(reference.parameters[name]), (memory, name)
    assert len(mixtures) >= 5
