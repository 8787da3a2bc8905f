"""Parts of a model are prefetched and updated during backward even if the loop never calls the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infinity.engine.training import TrainingEngine
from infinity.schedule.trace import PARTS
from infinity.units.unit import Residency, Unit
from infinity.update.job import UpdateJob
from support.configs import engine_config
from support.lifetime import assert_trains_like_plain
from support.loops import LossOf, call, open_engine, train
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)
UNITS = 8


def loss_by_parts(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss that `Stack` computes, by calling its parts one by one."""
    module = model.module if isinstance(model, TrainingEngine) else model
    tokens, targets = batch
    x = module.embedding(tokens)
    for block in module.blocks:
        x = block(x)
    return F.cross_entropy(module.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.5}, {"accumulation": 2}, {"prefetch_bytes": 70_000}, {"update": "after_backward"}],
    ids=str,
)
def test_parts_train_like_the_plain_loop(options: dict[str, Any]) -> None:
    assert_trains_like_plain(Stack, BATCHES, units=UNITS, loss_of=loss_by_parts, **options)


class Decisions:
    """Records the units fetched on demand and the units whose update was started in backward.

    Transfers and updates under way are waited for first, so that the record does not depend on timing.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self.on_demand: list[int] = []
        self.updated_in_backward: list[int] = []
        store, runner = engine.parts.store, engine.updates.runner
        use, start = runner.use, runner.start_update

        def watch_use(unit: Unit) -> None:
            if unit.residency is Residency.RELEASED:
                self.on_demand.append(unit.index)
            for other in store.units:
                if other.update is not None:
                    other.update.done.wait()
                if other.transfer is not None:
                    other.transfer.wait()
            use(unit)

        def watch_start(unit: Unit, job: UpdateJob) -> None:
            if torch._C._current_graph_task_id() != -1:
                self.updated_in_backward.append(unit.index)
            start(unit, job)

        runner.use, runner.start_update = watch_use, watch_start  # type: ignore[method-assign]


def decisions_of(loss_of: LossOf) -> Decisions:
    """Return the decisions of the fourth step; the first one records the trace."""
    config = engine_config(prefetch_bytes=70_000, update="during_backward")
    with open_engine(seeded(Stack), config) as engine:
        assert len(engine.units) == UNITS
        decisions = Decisions(engine)
        train(engine, BATCHES[:3], loss_of)
        assert decisions.on_demand and decisions.updated_in_backward
        decisions.on_demand, decisions.updated_in_backward = [], []
        fetched = engine.parts.store.fetches
        train(engine, BATCHES[3:4], loss_of)
        assert engine.parts.store.fetches >= fetched + UNITS // 2
    return decisions


def test_parts_are_fetched_ahead_and_updated_during_backward_like_the_roots() -> None:
    by_root, by_parts = decisions_of(call), decisions_of(loss_by_parts)
    assert by_parts.on_demand == by_root.on_demand == []
    assert by_parts.updated_in_backward == by_root.updated_in_backward != []


def test_the_trace_of_parts_does_not_grow() -> None:
    with open_engine(seeded(Stack), engine_config()) as engine:
        train(engine, BATCHES[:2], loss_by_parts)
        tracer = engine.parts.schedule.trace
        uses = len(tracer.known(PARTS).uses)
        for _ in range(3):
            train(engine, BATCHES, loss_by_parts)
            assert len(tracer.known(PARTS).uses) == uses
            assert len(tracer._recorded) == 0
