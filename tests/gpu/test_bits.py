"""Training on one device gives the same bits with states on the device, in host memory and on nvme.

On CUDA, Infinity's kernels update states on the device, with the bits of the host's kernels. On "late", torch's
operators update them and round otherwise: these placements are compared within bounds, and left out where torch has no
operator. The model has no operation whose bits may depend on the order of threads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.plan.placement import State
from infinity.tier_kind import TierKind
from infinity.update.kernels import NATIVE
from support.accelerator import accelerator, device, engine_device
from support.configs import engine_config
from support.loops import Result, assert_close, open_engine, parameters_of, train
from support.models import Linears, vector_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(accelerator() is None, reason="there is no accelerator here"),
    pytest.mark.pairwise,
]

STEPS, WIDTH = 5, 96
PLACES = [("none", "none"), ("cpu", "none"), ("none", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")]
"""Where parameters and optimizer states live, beside both in host memory."""
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-remainder": {"bf16": True},
    "bf16-master": {"bf16": True, "master": "fp32"},
    "fp16": {"fp16": {"initial_scale_power": 8}},
}


def run(config: Config, tiers: dict[State, set[str]]) -> Result:
    """Train on the device. tiers: those in which the states have to be."""
    torch.manual_seed(0)
    model = Linears(WIDTH, depth=5, bias=True)  # weights have two tiles of a sum of squares, and a part
    batches = vector_batches(STEPS * config.resolve_batch(1).accumulation, width=WIDTH)
    with open_engine(model, config, engine_device()) as engine:
        assert {state: engine.parts.plan.placement.tiers(state) for state in tiers} == tiers
        dtype = engine.parts.units[0].layout.dtype
        losses = train(engine, [tuple(part.to(device(), dtype) for part in batch) for batch in batches])
        assert engine.global_steps == STEPS and engine.skipped_steps == 0
        return Result(losses, parameters_of(engine))


def placed(param: str, optim: str, **options: Any) -> Result:
    tiers = {State.PARAM: {TierKind.of_config(param)}, State.OPTIM: {TierKind.of_config(optim)}}
    return run(engine_config(param, optim, lr=0.01, **options), tiers)


def difference(one: Result, other: Result) -> str:
    """Return the first difference, or nothing if all bits agree."""
    for number, (ours, theirs) in enumerate(zip(one.losses, other.losses, strict=True)):
        if ours != theirs:
            return f"loss {number}: {ours!r} and {theirs!r}"
    for name, value in one.parameters.items():
        expected = other.parameters[name]
        if not torch.equal(value, expected):
            apart = value != expected
            most = (value.double() - expected.double()).abs().max().item()
            return f"{name}: {int(apart.sum())} of {value.numel()} elements differ, by up to {most:.3g}"
    return ""


def is_exact(optimizer: str, moments: str) -> bool | None:
    """Return whether the device updates states with the host's bits; None if it cannot update such states."""
    if NATIVE.is_exact(device().type):
        return True
    return False if optimizer == "AdamW" and moments == "fp32" else None


def assert_alike(ours: Result, expected: Result, *, exact: bool, what: str) -> None:
    if exact:
        found = difference(ours, expected)
        assert not found, f"{what}: {found}"
    else:
        half = next(iter(expected.parameters.values())).dtype != torch.float32
        assert_close(ours, expected, loss=1e-2 if half else 1e-5, parameters=1e-2 if half else 1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "Lion", "AdEMAMix"])
@pytest.mark.parametrize("format", FORMATS)
def test_placements_agree(format: str, optimizer: str, moments: str, clip: float, accumulation: int) -> None:
    kept = {"optimizer": optimizer, "moments": moments, "clip": clip, "accumulation": accumulation}
    options, on_device = FORMATS[format] | kept, is_exact(optimizer, moments)
    expected = placed("cpu", "cpu", **options)
    for param, optim in PLACES:
        exact = on_device if optim == "none" else True
        if exact is not None:
            ours = placed(param, optim, **options)
            assert_alike(ours, expected, exact=exact, what=f"parameters on {param}, optimizer states on {optim}")


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("memory", [{"device_optimizer": 0.5}, {"device": "8GiB"}], ids=["share", "budget"])
def test_states_that_stay_on_the_device_agree(memory: dict[str, Any], format: str, clip: float, moments: str) -> None:
    """Half of the optimizer states by a share; all states by a budget, where kernels for the device are exact."""
    options, exact = FORMATS[format] | {"moments": moments, "clip": clip}, is_exact("AdamW", moments)
    if exact is None and "device_optimizer" in memory:
        pytest.skip(f"torch has no operator for moments in {moments} on {device().type}")
    optim = {"device", "host"} if "device_optimizer" in memory else {"device"} if exact else {"host"}
    param = optim if "device" in memory else {"host"}
    config = engine_config("cpu", "cpu", lr=0.01, memory=memory, **options)
    ours = run(config, {State.PARAM: param, State.OPTIM: optim})
    agrees = exact or "device" in memory
    assert_alike(ours, placed("cpu", "cpu", **options), exact=bool(agrees), what=str(memory))
