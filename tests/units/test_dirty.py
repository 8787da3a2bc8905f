"""Write-back: below stage 3 an fp32 unit's update leaves its tier alone, and the unit is written as it is released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from conftest import OpenEngine
from infinity.engine.training import TrainingEngine
from infinity.plan import drafts
from infinity.schedule import speculation
from infinity.tier_kind import TierKind
from support.beside import SCHEDULES, EngineLoop, assert_same_story, training
from support.configs import engine_config
from support.late_device import LateDevice
from support.loops import Result, assert_same, open_engine, parameters_of, train, trained
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(4)
RESIDENT: dict[str, Any] = {"param": "none", "optim": "none", "unit_size": 4096}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def stored(engine: TrainingEngine) -> list[torch.Tensor]:
    """Return the parameters of each unit in their tier, which may be older than those in its buffer."""
    return [engine.parts.states.read_param(unit.layout) for unit in engine.units]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@STAGES
@SCHEDULES
def test_updates_leave_the_tier_alone(update: str, stage: int, make_engine: OpenEngine) -> None:
    """Reading the model's states then writes every unit once."""
    engine = make_engine(seeded(Stack), **RESIDENT, stage=stage, update=update)
    assert len(engine.units) > 2
    first = stored(engine)
    train(engine, BATCHES)
    assert same(stored(engine), first)
    values = engine.state_dict()
    assert not any(unit.is_dirty for unit in engine.units)
    for unit, flat in zip(engine.units, stored(engine), strict=True):
        for slot in unit.layout.slots:
            assert torch.equal(flat[slot.offset : slot.stop].view(slot.shape), values[slot.name])
    assert not same(stored(engine), first)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3},
        {"stage": 1, "bf16": True},
        {"stage": 1, "durable": True},
        {"stage": 1, "late": True, "optim": "cpu"},
    ],
    ids=["stage 3", "bf16", "durable", "updated on the host"],
)
def test_units_whose_tier_is_read_are_written_by_updates(
    options: dict[str, Any], make_engine: OpenEngine, tmp_path: Path
) -> None:
    given = {**RESIDENT, **options}
    device = LateDevice() if given.pop("late", False) else None
    with open_engine(seeded(Stack), engine_config(**given, folder=tmp_path), device) as engine:
        assert not engine.parts.plan.written_late
        train(engine, BATCHES[:1])
        assert not any(unit.is_dirty for unit in engine.units)


def test_a_draft_that_is_taken_back_leaves_the_parameters_of_before(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "_room", lambda *_: dict.fromkeys(TierKind, float("inf")))
    monkeypatch.setattr(speculation, "PATIENCE", 0)
    results = []
    for speculate in (False, "auto"):
        options = {**RESIDENT, "optim": "nvme", "stage": 1, "clip": 1.0, "speculate": speculate, "folder": tmp_path}
        with open_engine(seeded(Stack), engine_config(**options)) as engine:
            plan, losses = engine.parts.plan, []
            assert bool(plan.drafted) == bool(speculate) and not plan.drafted & plan.written_late
            for number, batch in enumerate(token_batches(8)):
                loss = engine(*batch) * (1e3 if number % 3 == 2 else 1e-3)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results.append(Result(losses, engine.state_dict()))
    assert_same(*results)


# -- reads, edits and saves after each step ----------------------------------------------------------------------------


def state_dict(loop: Any) -> dict[str, torch.Tensor]:
    found = loop.engine.state_dict() if isinstance(loop, EngineLoop) else loop.model.state_dict()
    return {name: value.clone() for name, value in found.items()}


def edit(loop: Any) -> None:
    """Edit units that the last update has made dirty, with and without a version."""
    with torch.no_grad():
        loop.model.blocks[1].up.weight.mul_(0.5)
    loop.model.blocks[2].up.bias.data.add_(0.25)


def edit_and_read(loop: Any) -> Any:
    edit(loop)
    return state_dict(loop)


def evaluate(loop: Any) -> float:
    with torch.no_grad():
        return float(loop.model(*BATCHES[0]))


def read_one(loop: Any) -> torch.Tensor:
    weight = loop.model.blocks[1].up.weight
    found = infinity.get_full_fp32_param(weight) if isinstance(loop, EngineLoop) else weight.detach()
    return found.clone()


@pytest.mark.parametrize("extra", [state_dict, edit, edit_and_read, evaluate, read_one])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late device"])
@pytest.mark.parametrize("stage", [0, 2])
@SCHEDULES
def test_after_each_step(update: str, stage: int, late: bool, extra: Callable[[Any], Any]) -> None:
    place = {**RESIDENT, "stage": stage, "late": late, "update": update}
    assert_same_story(Stack, training(BATCHES, lambda loop, number: extra(loop)), place=place)


@pytest.mark.parametrize("background", [False, True])
@SCHEDULES
def test_a_checkpoint_holds_its_step(update: str, background: bool, make_engine: OpenEngine, tmp_path: Path) -> None:
    """Also if the next steps make the units dirty again while they are read."""
    engine = make_engine(seeded(Stack), **RESIDENT, stage=1, update=update)
    expected = []
    for number, batch in enumerate(BATCHES):
        train(engine, [batch])
        engine.save_checkpoint(tmp_path, tag=str(number), background=background)
        expected.append(parameters_of(engine))
    other = make_engine(seeded(Stack, seed=1), **RESIDENT, stage=0, update=update)
    for number, values in enumerate(expected):
        train(other, BATCHES[:1])  # dirty units are replaced
        other.load_checkpoint(tmp_path, tag=str(number))
        found = parameters_of(other)
        assert all(torch.equal(found[name], value) for name, value in values.items())


@SCHEDULES
def test_a_closed_engine_leaves_the_last_values(update: str) -> None:
    model, config = seeded(Stack), engine_config(**RESIDENT, stage=0, update=update)
    with open_engine(model, config) as engine:
        train(engine, BATCHES)
    expected = trained(seeded(Stack), BATCHES, config).parameters
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
