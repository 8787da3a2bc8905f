"""Python's work for a unit in a step, in counts that no machine changes: calls, and objects that a graph keeps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from infinity.tiers.device import CpuDevice
from infinity.tiers.headroom import Headroom, Planned
from support.configs import engine_config
from support.loops import open_engine

WIDTH = 16


class Unwatched(CpuDevice):
    """A device whose host memory nobody watches: a watch looks every few milliseconds, in more calls if time passes."""

    def headroom(self, planned: Planned) -> Headroom:
        return Headroom(watches=False)


class Units(nn.Module):
    """Linear layers, each a unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def calls_of(step: Callable[[], None]) -> int:
    """Return the number of Python functions and C functions that `step` calls in this thread."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def counts(units: int) -> tuple[int, int]:
    """Return the calls of a step and the tracked objects that its graph adds, for a model of so many units."""
    config = engine_config("none", "none", unit_size=1 << 10)
    with open_engine(Units(units), config, Unwatched()) as engine:
        assert len(engine.units) == units
        x = torch.randn(4, WIDTH)

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        for _ in range(3):
            step()
        calls = calls_of(step)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            loss = engine(x)
            kept = len(gc.get_objects()) - before
        finally:
            gc.enable()
        engine.backward(loss)
        engine.step()
    return calls, kept


def test_a_unit_costs_few_calls_and_its_graph_keeps_few_objects() -> None:
    """The garbage collector visits what a graph keeps, in each unit's share of its runs."""
    (calls, kept), (more, kept_more) = counts(20), counts(40)
    assert (more - calls) / 20 < 1170
    assert (kept_more - kept) / 20 < 10
