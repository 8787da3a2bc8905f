"""A frozen base with a small trained part: few units are resident for any depth of the base, which is never written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.plan.placement import State
from support.configs import engine_config
from support.lifetime import Residents, assert_nothing_leaked, assert_trains_like_plain, pool_buffers
from support.loops import open_engine, parameters_of, train
from support.models import Block, Stack, seeded, token_batches

BATCHES = token_batches(6)
SCHEDULES = pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 2}], ids=str)


def frozen_with_head(depth: int = 6) -> Stack:
    model = Stack(depth=depth)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of rank 4, as in LoRA."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(depth: int = 6, reentrant: bool | None = None) -> Stack:
    """Frozen and trained parameters in one block."""
    model = Stack(depth=depth)
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = LowRank(block.up)  # type: ignore[assignment]
        block.down = LowRank(block.down)  # type: ignore[assignment]
    if reentrant is not None:

        def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)
            return out

        model.run = run
    return model


@SCHEDULES
def test_a_frozen_base_with_a_head(options: dict[str, Any]) -> None:
    assert_trains_like_plain(frozen_with_head, BATCHES, units=8, **options)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@SCHEDULES
def test_adapters_in_frozen_blocks(reentrant: bool | None, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: adapted(reentrant=reentrant), BATCHES, units=14, **options)


def test_a_frozen_middle() -> None:
    """Gradients flow through frozen blocks, whose weights backward needs."""

    def make() -> Stack:
        model = Stack()
        model.blocks[1:5].requires_grad_(False)
        return model

    assert_trains_like_plain(make, BATCHES, units=8)


@pytest.mark.parametrize("make", [frozen_with_head, adapted])
def test_residents_do_not_grow_with_depth(make: Any) -> None:
    most, buffers = [], []
    for depth in (6, 24):
        with open_engine(seeded(lambda depth=depth: make(depth)), engine_config(prefetch_bytes=0)) as engine:
            residents = Residents(engine)
            train(engine, BATCHES[:3])
            most.append(residents.most)
            buffers.append(pool_buffers(engine))
            assert len(engine.units) >= depth + 2
            assert not engine.parts.store.kept.warned
            assert_nothing_leaked(engine)
    assert most[0] == most[1] <= buffers[0] == buffers[1]


def test_frozen_parameters_are_not_written() -> None:
    with open_engine(seeded(frozen_with_head), engine_config(prefetch_bytes=0)) as engine:
        before = parameters_of(engine)
        train(engine, BATCHES[:1])
        engine.settle()
        written = engine.ledger.snapshot().nvme_bytes_written
        train(engine, BATCHES[1:3])
        engine.settle()
        step = (engine.ledger.snapshot().nvme_bytes_written - written) / 2
        head = next(unit for unit in engine.units if unit.layout.trainable).layout
        assert step == head.numel * (4 + 8)  # parameter and two moments, fp32
        after = parameters_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before if name != "head.weight")
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_frozen_units_have_no_states() -> None:
    with open_engine(seeded(adapted), engine_config(bf16=True)) as engine:
        train(engine, BATCHES[:2])
        for unit in engine.units:
            assert engine.parts.plan.placement.holds(unit.index, State.PARAM)
            assert engine.parts.plan.placement.holds(unit.index, State.OPTIM) == unit.layout.trainable
            assert engine.parts.plan.placement.holds(unit.index, State.GRAD) == unit.layout.trainable
