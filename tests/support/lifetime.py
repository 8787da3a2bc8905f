"""Shared code of the lifetime tests: training with few resident units must equal a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.tiers.device import Device
from infinity.units.unit import Unit
from support.configs import engine_config
from support.loops import Batches, LossOf, Result, assert_close, call, open_engine, parameters_of, plain
from support.models import seeded


class Residents:
    """Counts the units that have a device buffer at every use of a unit."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self.most = 0
        self.uses = 0
        self._use = engine.parts.runner.use
        engine.parts.runner.use = self.watch  # type: ignore[method-assign]

    def watch(self, unit: Unit) -> None:
        self._use(unit)
        self.uses += 1
        self.most = max(self.most, len(leased(self._engine)))


def leased(engine: TrainingEngine) -> list[Unit]:
    """Return the units with a device buffer."""
    return [unit for unit in engine.units if unit.lease is not None]


def pool_buffers(engine: TrainingEngine) -> int:
    """Return how many units can be resident at once."""
    pool = next(pool for pool in engine.parts.pools if pool.name == "units")
    return sum(pool._counts.values())


def free_buffers(engine: TrainingEngine) -> dict[str, tuple[int, int]]:
    """Return pool → (free buffers, buffers)."""
    return {
        pool.name: (sum(len(free) for free in pool._free.values()), sum(pool._counts.values()))
        for pool in engine.parts.pools
    }


def assert_nothing_leaked(engine: TrainingEngine) -> None:
    """Assert that no unit is held and every pool is full, once all states are in their tiers."""
    engine.settle()
    assert not any(unit.pin_count for unit in engine.units)
    assert not leased(engine)
    for name, (free, count) in free_buffers(engine).items():
        assert free == count, f"pool {name}: {free} of {count} buffers are free"


def assert_trains_like_plain(
    make: Callable[[], nn.Module],
    batches: Batches,
    *,
    units: int,
    loss_of: LossOf = call,
    device: Device | None = None,
    loss: float = 1e-6,
    parameters: float = 1e-5,
    quarantines: bool = False,
    **options: Any,
) -> Result:
    """fp32 training by the engine and by a plain loop agree; fewer units are resident at once than there are.

    units: the least number the model must make. quarantines: views are kept.
    """
    config = engine_config(**{"prefetch_bytes": 0, **options})
    expected = plain(seeded(make), batches, config, loss_of)
    with open_engine(seeded(make), config, device) as engine:
        assert len(engine.units) >= units
        residents = Residents(engine)
        losses = []
        for batch in batches:
            loss_now = loss_of(engine, batch)
            engine.backward(loss_now)
            engine.step()
            losses.append(loss_now.item())
        del loss_now
        assert bool(engine.parts.store.kept.warned) == quarantines
        assert residents.most <= pool_buffers(engine)
        assert residents.most < len(engine.units)
        result = Result(losses, parameters_of(engine), len(engine.units))
        assert_nothing_leaked(engine)
    assert_close(result, expected, loss=loss, parameters=parameters)
    return result


def run_forward(model: nn.Module, *batch: torch.Tensor) -> float:
    """Return the loss, computed without gradients."""
    with torch.no_grad():
        return float(model(*batch))
