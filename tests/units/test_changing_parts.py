"""Steps that each train other parameters equal a plain loop, whatever changes between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from infinity.engine.training import TrainingEngine
from support.changing import ALL, CHANGES, MODES, Changing, Uses, draw_uses, plain_steps, prepare, tokens_of, with_mode
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of
from support.models import seeded

TIERS = pytest.mark.parametrize("options", [
    {"param": "none", "optim": "none"},
    {"param": "none", "optim": "none", "unit_size": "auto", "debug": False, "cache_bytes": "auto"},
    {"param": "cpu", "optim": "cpu"},
    {"param": "nvme", "optim": "nvme"},
    {"param": "nvme", "optim": "cpu", "unit_size": 200},
    {"param": "nvme", "optim": "nvme", "accumulation": 2},
    {"param": "cpu", "optim": "nvme", "clip": 0.5},
], ids=str)  # fmt: skip


def _train(engine: TrainingEngine, steps: Sequence[Uses]) -> list[float]:
    losses = []
    for number, uses in enumerate(steps, 1):
        prepare(engine.module, uses)
        loss = engine(tokens_of(number), uses)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _compare(steps: Sequence[Uses], options: dict[str, Any], *, late: bool = False) -> None:
    options = {"lr": 1e-2, "unit_size": 400, **options}
    config = engine_config(**options)
    expected = plain_steps(steps, options.get("accumulation", 1), options.get("clip", 0.0))
    with open_engine(seeded(Changing), config, LateDevice() if late else None) as engine:
        losses = _train(engine, steps)
        found = Result(losses, parameters_of(engine))
        assert_nothing_leaked(engine)
    assert_close(found, expected, loss=1e-5, parameters=1e-4)


@TIERS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.replace(" ", "_"))
def test_a_change_between_steps(change: str, options: dict[str, Any]) -> None:
    """A change, its way back, and steps that alternate."""
    one, other = CHANGES[change]
    _compare([one] * 4 + [other] * 3 + [one] * 3 + [other, one] * 2, options)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.replace(" ", "_"))
def test_a_change_on_a_device_whose_copies_are_late(change: str) -> None:
    one, other = CHANGES[change]
    _compare([one] * 4 + [other] * 2 + [one], {"param": "nvme", "optim": "nvme"}, late=True)


@pytest.mark.parametrize("uses", [ALL, ALL[1:], *(with_mode(1, mode) for mode in MODES)], ids=str)
def test_units_are_updated_during_backward(uses: Uses) -> None:
    """Every unit with a gradient is, once steps repeat: querying the graph costs no overlap."""
    with open_engine(seeded(Changing), engine_config(unit_size=400, update="during_backward")) as engine:
        _train(engine, [uses] * 3)
        prepare(engine.module, uses)
        engine.backward(engine(tokens_of(4), uses))
        updated = {engine.units[index].name for index in engine.parts.schedule.step.updated}
        with_gradient = {unit.name for unit in engine.units if unit.collected}
        engine.step()
    assert updated == with_gradient


@pytest.mark.parametrize("seed", range(40))
def test_drawn_steps(seed: int) -> None:
    """Steps drawn with any mix of parts: some repeat, so that a trace is known when one departs from it."""
    source = random.Random(seed)
    tier = source.choice(["none", "cpu", "nvme"])
    kinds = [draw_uses(source) for _ in range(3)]
    steps = [source.choice(kinds) for _ in range(6) for _ in range(source.randint(1, 3))]
    options: dict[str, Any] = {"param": tier, "optim": tier, "unit_size": source.choice([100, 300, 100_000])}
    if source.random() < 0.3:
        options["accumulation"] = 2
        steps = steps[: len(steps) // 2 * 2]
    _compare(steps, options)
