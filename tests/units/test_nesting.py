"""Nested modules, each a unit of its own, are held at once, and the pool has as many buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.errors import InfinityError
from infinity.tiers.device import CpuDevice
from infinity.units.discover import blocks, discover, held_together, modules_to_hook
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import Block, Stack, seeded, vector_batches

WIDTH = 16
BATCHES = vector_batches(4, width=WIDTH)


class Level(nn.Module):
    """Uses its own parameters before and after the levels below it. (batch, WIDTH) → the same."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        hidden = 3 + depth % 7
        self.up = nn.Parameter(torch.randn(WIDTH, hidden) / 4)
        self.down = nn.Parameter(torch.randn(hidden, WIDTH) / 8)
        self.below = Level(depth - 1) if depth > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x @ self.up
        if self.below is not None:
            x = x + 0.1 * self.below(x)
        return x + torch.tanh(inner) @ self.down


class Nest(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.top = Level(depth)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.top(x), targets)


@pytest.mark.parametrize("depth", [10, 30, 60])
def test_nested_modules_train_like_plain(depth: int, tmp_path: Path) -> None:
    """Nested modules train like plain with and without prefetch, bit-identically."""
    expected = plain(seeded(lambda: Nest(depth)), BATCHES, engine_config(folder=tmp_path))
    results = []
    for prefetch in (0, "auto"):
        config = engine_config(folder=tmp_path, unit_size=64, prefetch_bytes=prefetch)
        with open_engine(seeded(lambda: Nest(depth)), config) as engine:
            assert len(engine.units) >= depth
            losses = train(engine, BATCHES)
            results.append(Result(losses, parameters_of(engine)))
            assert not engine.parts.store.kept.warned
            assert_nothing_leaked(engine)
    assert results[0].losses == results[1].losses
    assert all(torch.equal(value, results[1].parameters[name]) for name, value in results[0].parameters.items())
    assert results[0].losses[0] == expected.losses[0]
    assert_close(results[0], expected, loss=1e-6, parameters=1e-5)


def test_nested_modules_run(tmp_path: Path) -> None:
    model = seeded(lambda: Nest(30))
    expected = model(*BATCHES[0])
    config = engine_config(folder=tmp_path, unit_size=64, prefetch_bytes=0)
    with infinity.init_inference(model, config, device=CpuDevice()) as engine, torch.no_grad():
        assert torch.equal(engine(*BATCHES[0]), expected)


def together(model: nn.Module, unit_size: int) -> list[list[str]]:
    """Return the sorted names of the units on every path."""
    units = discover(model, unit_size)
    index = {id(p): number for number, unit in enumerate(units) for p in unit.parameters}
    hooked = modules_to_hook(model, index, [unit.root for unit in units])
    return sorted(sorted(units[number].name for number in held) for held in held_together(model, hooked))


def test_units_on_a_path() -> None:
    assert together(Nest(3), 64) == [["top", "top.below", "top.below.below"]]
    assert together(Stack(depth=2), 100_000) == [["blocks.0"], ["blocks.1"], ["embedding"], ["head"]]


def test_a_shared_module_is_on_each_of_its_paths() -> None:
    model = nn.Sequential(Level(1), Level(1))
    shared = Block(WIDTH)
    for level in model:
        level.below = shared
    assert together(model, 64) == [
        ["0", "0.below.down"],
        ["0", "0.below.norm"],
        ["0", "0.below.up"],
        ["0.below.down", "1"],
        ["0.below.norm", "1"],
        ["0.below.up", "1"],
    ]


def test_a_tied_unit_is_held_once() -> None:
    model = Nest(3)
    model.top.below.below.up = model.top.up
    model.top.below.below.down = model.top.down
    assert together(model, 64) == [["top", "top.below"]]


class Outside(nn.Module):
    """Calls levels that are not its children, each from within the former one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Level(1) for _ in range(depth))
        for level, following in zip(self.levels[:-1], self.levels[1:], strict=True):
            object.__setattr__(level, "below", following)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.levels[0](x), targets)


def test_modules_that_are_nested_only_when_they_run_are_named(tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, unit_size=64, prefetch_bytes=0)
    said = r"needs a device buffer.*prefetch_bytes"
    with open_engine(seeded(lambda: Outside(20)), config) as engine, pytest.raises(InfinityError, match=said):
        engine(*BATCHES[0])


class Experts(nn.Module):
    """Has a list in an entry of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)])


def test_blocks_are_the_entries_of_the_innermost_lists() -> None:
    model = nn.Module()
    model.first = nn.Linear(2, 2)
    model.layers = nn.ModuleList([Experts(), Experts()])
    model.plain = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
    unit_of = {id(p): number for number, p in enumerate(model.parameters())}
    four = [sorted(block) for block in blocks(model, unit_of)]
    starts = [unit_of[id(m.weight)] for m in (model.layers[0].experts[0][0], model.layers[0].experts[1][0])]
    starts += [unit_of[id(m.weight)] for m in (model.layers[1].experts[0][0], model.layers[1].experts[1][0])]
    starts.append(unit_of[id(model.plain[0][0].weight)])
    assert sorted(four) == [list(range(start, start + 4)) for start in sorted(starts)]
