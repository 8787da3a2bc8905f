"""Gradients that updates consume on arrival: memory of others exists while they wait, and at most two steps more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.plan.placement import Extent, State
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.passing import PassingTier
from infinity.tiers.pool import Pool
from support.configs import engine_config
from support.late_device import LateDevice
from support.locked import locked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import Stack, seeded, token_batches

EXTENT, OTHER = Extent(TierKind.HOST, 0, 8192, "gradient"), Extent(TierKind.HOST, 8192, 4096, "gradient of another")
NO_POOL = Pool(torch.empty, {}, name="none")


def filled(value: int, extent: Extent = EXTENT) -> torch.Tensor:
    return torch.full((extent.nbytes,), value, dtype=torch.uint8)


@pytest.fixture
def tier() -> PassingTier:
    return locked(PassingTier, "_held", "_spare", "_old")(TierKind.HOST, CpuDevice())


def test_bytes_exist_from_a_write_to_its_discard(tier: PassingTier) -> None:
    assert tier.nbytes == 0
    tier.write(EXTENT, filled(1)).wait()
    tier.write(OTHER, filled(2, OTHER)).wait()
    assert tier.nbytes == EXTENT.nbytes + OTHER.nbytes
    found = filled(0)[4096:]
    tier.read(EXTENT, found, 4096).wait()
    assert (found == 1).all()
    tier.discard(EXTENT)
    tier.discard(EXTENT)
    tier.trim()
    assert tier.nbytes == EXTENT.nbytes + OTHER.nbytes
    tier.trim()
    assert tier.nbytes == OTHER.nbytes
    tier.discard(OTHER)
    tier.clear()
    assert tier.nbytes == 0


@pytest.mark.parametrize("trims", [0, 1])
def test_memory_of_discarded_bytes_is_written_again(trims: int, tier: PassingTier) -> None:
    tier.write(EXTENT, filled(1)).wait()
    before = tier.window(EXTENT, 0, 8192, NO_POOL)
    tier.discard(EXTENT)
    for _ in range(trims):
        tier.trim()
    tier.write(EXTENT, filled(2)).wait()
    after = tier.window(EXTENT, 0, 8192, NO_POOL)
    assert before is not None and after is not None
    assert before.tensor.data_ptr() == after.tensor.data_ptr() and tier.nbytes == EXTENT.nbytes


def test_a_reader_discards_only_the_bytes_that_it_has_read(tier: PassingTier) -> None:
    """A gradient of the next step stays, and a window keeps its own bytes."""
    tier.write(EXTENT, filled(1)).wait()
    window = tier.window(EXTENT, 4096, 4096, NO_POOL)
    assert window is not None
    tier.write(EXTENT, filled(2)).wait()
    assert (window.tensor == 1).all()
    tier.discard(EXTENT, window.tensor)
    window = tier.window(EXTENT, 0, 8192, NO_POOL)
    assert window is not None and (window.tensor == 2).all()
    tier.discard(EXTENT, window.tensor)
    with pytest.raises(infinity.InfinityError, match="internal error: the gradient was read"):
        tier.window(EXTENT, 0, 8192, NO_POOL)


def test_a_discarded_extent_cannot_be_read(tier: PassingTier) -> None:
    with pytest.raises(infinity.InfinityError, match="internal error: the gradient was read"):
        tier.read(EXTENT, filled(0))


def held(engine: Any) -> int:
    passing = engine.parts.training.passing
    return 0 if passing is None else int(passing.nbytes)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("optim", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 3])
def test_memory_of_the_first_gradients_is_given_back(stage: int, optim: str, late: bool, tmp_path: Path) -> None:
    """Later steps store only the gradient of an embedding, which is not resident when backward ends."""
    if optim == "none" and late:
        pytest.skip("no kernels for this device")
    device: Device = LateDevice(delay=0.005) if late else CpuDevice()
    config = engine_config("none" if stage < 3 else "cpu", optim, folder=tmp_path, stage=stage)
    batches = token_batches(5)
    expected = plain(seeded(Stack), batches, config)
    with open_engine(seeded(Stack), config, device) as engine:
        plan, tier = engine.parts.plan, plan_tier(optim)
        total = sum(plan.placement.of(unit.index, State.GRAD).nbytes for unit in engine.units)
        assert total <= plan.passing[tier] == plan.peak_nbytes()[tier] - plan.nbytes()[tier]
        assert "in the first step" in engine.describe()
        at_backward = []
        losses = []
        for inputs in batches:
            loss = engine(*inputs)
            engine.backward(loss)
            engine.updates.gradients.settle()
            at_backward.append(held(engine))
            engine.step()
            losses.append(loss.item())
        last = plan.placement.of(0, State.GRAD).nbytes if stage == 3 else 0
        assert at_backward[0] == at_backward[1] == total and at_backward[3:] == [last] * 2
        assert engine.ledger.tier_bytes()[tier] == plan.nbytes()[tier] + last
        engine.settle()
        assert_close(Result(losses, parameters_of(engine)), expected)


def plan_tier(optim: str) -> str:
    return "device" if optim == "none" else "host"


@pytest.mark.parametrize(
    "options",
    [{"accumulation": 2}, {"clip": 1.0}, {"update": "after_backward"}, {"accumulation_buffers": True}],
    ids=str,
)
def test_gradients_that_wait_in_every_step_have_their_memory_reserved(options: dict[str, Any], tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", folder=tmp_path, **options)) as engine:
        plan = engine.parts.plan
        assert not plan.passing and engine.parts.training.passing is None
        assert plan.peak_nbytes() == plan.nbytes() == engine.ledger.tier_bytes()


def test_dropped_gradients_release_their_memory(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", folder=tmp_path)) as engine:
        (inputs,) = token_batches(1)
        engine.backward(engine(*inputs))
        engine.updates.gradients.settle()
        assert held(engine)
        stored = held(engine)
        engine.drop_gradients()
        assert held(engine) == stored
        train(engine, token_batches(5))
        assert held(engine) < stored
