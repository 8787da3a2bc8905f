"""When and in what portions states move never changes a result: prefetch, tiles, units, threads, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.plan.placement import State
from infinity.tiers.slab import SlabTier
from infinity.units.unit import Unit
from infinity.units.write_back import WriteBack
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Result, open_engine, parameters_of, train
from support.models import Stack, seeded, token_batches
from support.states import states_of

STEPS = 5

KNOBS: dict[str, dict[str, Any]] = {
    "no prefetch": {"prefetch_bytes": 0},
    "one unit ahead": {"prefetch_bytes": 40_000},
    "everything ahead": {"prefetch_bytes": "1GiB"},
    "small tiles": {"tile_size": 4096},
    "one tile": {"tile_size": 1 << 20},
    "tiles by the tier": {"tile_size": "auto", "optim": "cpu"},
    "two threads": {"adam_threads": 2},
    "small units": {"unit_size": 4096},
    "one large unit beside the blocks": {"unit_size": "64MiB"},
    "after backward": {"update": "after_backward"},
    "next forward": {"update": "next_forward"},
    "no poison, warm buffers": {"debug": False},
    "late device": {"device": "late"},
    "late device, next forward, no prefetch": {"device": "late", "update": "next_forward", "prefetch_bytes": 0},
}


def run(folder: Path, *, bf16: bool, clip: float, accumulation: int, **options: Any) -> Result:
    device = LateDevice(delay=0.01) if options.pop("device", "") == "late" else None
    config = engine_config(folder=folder, bf16=bf16, clip=clip, accumulation=accumulation, **options)
    # Wide enough that a unit has several tiles of 4096 elements.
    model = seeded(lambda: Stack(width=48, depth=4, tied=True))
    with open_engine(model, config, device) as engine:
        losses = train(engine, token_batches(STEPS * accumulation))
        return Result(losses, parameters_of(engine) | states_of(engine), len(engine.parts.units))


def assert_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.mark.parametrize(
    ("bf16", "clip", "accumulation"),
    [(False, 0.0, 1), (False, 0.3, 1), (True, 0.0, 3), (True, 0.3, 1)],
    ids=["fp32", "fp32 clipped", "bf16 accumulated", "bf16 clipped"],
)
def test_knobs(bf16: bool, clip: float, accumulation: int, tmp_path: Path) -> None:
    """Every setting is bit-identical to the defaults: losses, parameters, masters and moments."""
    common: dict[str, Any] = {"bf16": bf16, "clip": clip, "accumulation": accumulation}
    reference = run(tmp_path, **common)
    units = set()
    for name, options in KNOBS.items():
        result = run(tmp_path, **common, **options)
        units.add(result.units)
        try:
            assert_bits(result, reference)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert len(units) > 1, "unit_size did not change the number of units"


@pytest.mark.parametrize("schedule", ["during_backward", "after_backward", "next_forward"])
def test_schedules_without_clipping(schedule: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"bf16": True, "clip": 0.0, "accumulation": 1}
    assert_bits(run(tmp_path, update=schedule, **common), run(tmp_path, **common))


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("param", "optim"), [("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("none", "cpu"), ("none", "none")]
)
def test_a_share_of_the_updates_in_the_next_forward(
    param: str, optim: str, accumulation: int, share: float, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"param": param, "optim": optim, "bf16": True, "clip": 0.0, "accumulation": accumulation}
    reference = run(tmp_path, **common)
    for options in ({}, {"prefetch_bytes": 0}, {"device": "late"}):
        assert_bits(run(tmp_path, forward_updates=share, **common, **options), reference)


def test_a_share_of_the_units_is_updated_in_the_next_forward(tmp_path: Path) -> None:
    """Units of the plan keep their gradients until then."""
    config = engine_config(folder=tmp_path, forward_updates=0.4, prefetch_bytes=0)
    with open_engine(seeded(lambda: Stack(width=48, depth=8)), config) as engine:
        chosen = engine.parts.plan.in_forward
        assert 2 <= len(chosen) < len(engine.parts.units) / 2
        for number, batch in enumerate(token_batches(4)):
            engine.backward(engine(*batch))
            early = {unit.index for unit in engine.parts.units if unit.updated_early}
            engine.step()
            pending = {unit.index for unit in engine.parts.units if unit.due_update is not None}
            if number:  # the first step has no trace
                assert len(early) > 2 and not early & chosen
                assert pending & chosen


@pytest.mark.parametrize("optim", ["cpu", "nvme"])
def test_parameters_in_host_memory_are_updated_in_place(optim: str, tmp_path: Path) -> None:
    """On a CPU too, no step copies parameters from a buffer to their extent."""
    config = engine_config("cpu", optim, folder=tmp_path, bf16=True, prefetch_bytes=0)
    with open_engine(seeded(lambda: Stack(width=48, depth=8)), config) as engine:
        placement, tier = engine.parts.plan.placement, engine.parts.tiers["host"]
        assert isinstance(tier, SlabTier)
        extents = [placement.of(unit.index, State.PARAM).offset for unit in engine.parts.units]
        before = [tier.writes[offset] for offset in extents]
        train(engine, token_batches(4))
        assert [tier.writes[offset] for offset in extents] == before


def test_a_copy_within_host_memory_takes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit's buffer is not hashed when the unit arrives, unless an update left the parameters in a buffer."""
    hashed = 0
    note_unedited = WriteBack.note_unedited

    def counted(write_back: WriteBack, unit: Unit) -> None:
        nonlocal hashed
        hashed += 1
        note_unedited(write_back, unit)

    config = engine_config("cpu", "cpu", bf16=True, prefetch_bytes=0, unit_size=1)
    with open_engine(seeded(lambda: Stack(width=48, depth=8)), config) as engine:
        train(engine, token_batches(3))
        before = engine.ledger.snapshot()
        monkeypatch.setattr(WriteBack, "note_unedited", counted)
        train(engine, token_batches(1))
        assert (engine.ledger.snapshot() - before).fetches > 10 * hashed
