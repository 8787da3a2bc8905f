"""Activation checkpointing by the user, reentrant and not: units are fetched again and their uses counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_trains_like_plain
from support.loops import open_engine, parameters_of, train
from support.models import Block, Stack, seeded, token_batches

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
SCHEDULES = pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulation": 2}], ids=str)
BATCHES = token_batches(6)


def run_checkpointed(reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return out

    return run


@REENTRANT
@SCHEDULES
def test_a_block(reentrant: bool, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: Stack(run=run_checkpointed(reentrant)), BATCHES, units=8, **options)


@REENTRANT
def test_a_block_on_a_late_device(reentrant: bool, late_device: LateDevice) -> None:
    make = lambda: Stack(run=run_checkpointed(reentrant))  # noqa: E731
    assert_trains_like_plain(make, BATCHES, units=8, device=late_device)


def twice(reentrant: bool | None) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@SCHEDULES
def test_a_block_used_twice_in_a_row(reentrant: bool | None, options: dict[str, Any]) -> None:
    """Under reentrant checkpointing its gradients arrive twice: it must not be updated after the first time."""
    assert_trains_like_plain(lambda: Stack(run=twice(reentrant)), BATCHES, units=8, **options)


class Looped(Stack):
    """Runs all blocks twice, as ALBERT shares its layers."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@SCHEDULES
def test_blocks_used_again(reentrant: bool | None, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: Looped(reentrant), BATCHES, units=8, **options)


class Nested(Stack):
    """Two halves, each a checkpoint, of blocks that are checkpoints."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner

    def half(self, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=self.inner)
        return x

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for part in (self.blocks[:3], self.blocks[3:]):
            x = checkpoint(self.half, x, part, use_reentrant=self.outer)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("outer", [True, False], ids=["outer reentrant", "outer not"])
@pytest.mark.parametrize("inner", [True, False], ids=["inner reentrant", "inner not"])
@SCHEDULES
def test_nested(outer: bool, inner: bool, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: Nested(outer, inner), BATCHES, units=8, **options)


class Segmented(Stack):
    """One checkpoint over several blocks: recomputation needs them all, one after the other."""

    def __init__(self, reentrant: bool, depth: int = 8) -> None:
        super().__init__(depth=depth)
        self.reentrant = reentrant

    def half(self, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        half = len(self.blocks) // 2
        for part in (self.blocks[:half], self.blocks[half:]):
            x = checkpoint(self.half, x, part, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@REENTRANT
@SCHEDULES
def test_a_checkpoint_over_more_blocks_than_there_are_buffers(reentrant: bool, options: dict[str, Any]) -> None:
    """Recomputation keeps references to weights, as the forward does, so it needs no more buffers and warns of none."""
    assert_trains_like_plain(lambda: Segmented(reentrant), BATCHES, units=10, **options)


class Partly(nn.Module):
    """A block that checkpoints a part of itself, so that its unit is needed while its own forward is over."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.block = Block(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out + self.scale


def partly(reentrant: bool) -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(Partly(32, reentrant) for _ in range(6))
    return model


@REENTRANT
@SCHEDULES
def test_a_part_of_a_block(reentrant: bool, options: dict[str, Any]) -> None:
    assert_trains_like_plain(lambda: partly(reentrant), BATCHES, units=8, **options)


@REENTRANT
def test_how_often_a_block_is_used_changes(reentrant: bool) -> None:
    """A block that is used once in one step and twice in a row in the next is not updated after its first gradients."""

    class Varying(Stack):
        step = 0

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for number, block in enumerate(self.blocks):
                for _ in range(1 + (self.step + number) % 3):
                    x = checkpoint(block, x, use_reentrant=reentrant)
            self.step += 1
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    assert_trains_like_plain(Varying, token_batches(9), units=8)


@REENTRANT
def test_units_are_updated_during_backward_all_the_same(reentrant: bool) -> None:
    """Units that stay resident are updated early under checkpoints, too: the rules above do not hold for want of it."""
    config = engine_config(cache_bytes=4 << 20)
    with open_engine(seeded(lambda: Stack(run=run_checkpointed(reentrant))), config) as engine:
        train(engine, BATCHES[:3])
        engine.backward(engine(*BATCHES[0]))
        assert len(engine.parts.schedule.step.updated) >= len(engine.units) - 1
        engine.step()


def test_backwards_of_a_reentrant_checkpoint_around_the_engine_are_counted_apart() -> None:
    """Two backwards in a row count as two, though the model's code runs in them only by recomputation."""
    results = []
    for reentrant in (True, False):
        with open_engine(seeded(Stack), engine_config(accumulation=2)) as engine:
            for tokens, targets in BATCHES:
                weight = torch.ones((), requires_grad=True)
                loss = checkpoint(
                    lambda weight, tokens=tokens, targets=targets: engine(tokens, targets) * weight,
                    weight,
                    use_reentrant=reentrant,
                )
                engine.scale(loss).backward(retain_graph=True)
                engine.scale(0.5 * loss).backward()
                engine.step()
            assert engine.global_steps == len(BATCHES)
            results.append(parameters_of(engine))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])


@SCHEDULES
def test_an_edit_in_what_is_computed_again(options: dict[str, Any]) -> None:
    """Recomputation reads present values after an edit, as in PyTorch, which has no version to compare there."""

    def run(block: Block, x: torch.Tensor) -> torch.Tensor:
        def edited(x: torch.Tensor) -> torch.Tensor:
            block.up.weight.detach().mul_(0.9)
            out: torch.Tensor = block(x)
            return out

        out: torch.Tensor = checkpoint(edited, x, use_reentrant=False)
        return out

    assert_trains_like_plain(lambda: Stack(run=run), BATCHES, units=8, **options)


class Statistics(nn.Module):
    """Reads and edits a frozen parameter in a checkpointed part of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


class Centred(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.statistics = Block(width), Statistics(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda x: self.statistics(self.block(x)), x, use_reentrant=False)
        return out


def _gradients_take_a_dict() -> bool:
    x = torch.ones(1, requires_grad=True)
    try:
        return isinstance(torch.autograd.grad(x.sum(), {"x": x}), dict)
    except RuntimeError:  # torch 2.11
        return False


@pytest.mark.parametrize("wanted", ["dict", "weight", "weight with zeros"])
def test_gradients_that_are_asked_for_by_parameter(wanted: str, make_engine: OpenEngine) -> None:
    """Recomputation in `torch.autograd.grad(loss, parameter)` fetches parameters as other code does."""

    def make() -> Stack:
        model = Stack()
        model.blocks = nn.ModuleList(Centred(32) for _ in range(6))
        return model

    if wanted == "dict" and not _gradients_take_a_dict():
        pytest.skip("torch.autograd.grad of this torch takes no dict")
    engine, model = make_engine(seeded(make)), seeded(make)
    for batch in BATCHES[:3]:
        found = []
        for module in (engine.module, model):
            unused = nn.Parameter(torch.ones(3))
            inputs = {"weight": module.blocks[2].block.up.weight, "head": module.head.weight, "unused": unused}
            options = {"materialize_grads": True} if wanted == "weight with zeros" else {"allow_unused": True}
            asked = inputs if wanted == "dict" else list(inputs.values())
            gradients = torch.autograd.grad(module(*batch), asked, **options)
            found.append(list(gradients.values()) if isinstance(gradients, dict) else gradients)
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
