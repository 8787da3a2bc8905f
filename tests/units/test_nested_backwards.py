"""Backwards with nested ones count as one micro-batch each, whichever graph task brings the first gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.beside import PLACES, SCHEDULES, assert_same_story
from support.models import vector_batches

BATCHES = vector_batches(6)
Run = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]


def reentrant(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(part, x, use_reentrant=True)
    return out


def nested(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run `part` under three nested checkpoints."""
    return reentrant(lambda y: reentrant(lambda z: reentrant(part, z), y), x)


class Recomputed(torch.autograd.Function):
    """Recomputes `part` in backward and runs a backward of its own, without saving a tensor by autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.x, ctx.part = x.detach(), part
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            out = ctx.part(x)
        out.backward(gradients[0])
        return x.grad, None


def custom(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Recomputed.apply(x, part)
    return out


def in_rows(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run `part` on chunks of the batch, each under a checkpoint."""
    return torch.cat([reentrant(part, rows) for rows in x.chunk(2)])


def custom_in_checkpoint(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return reentrant(lambda y: custom(part, y), x)


def alternately(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    non: torch.Tensor = checkpoint(lambda y: reentrant(part, y), x, use_reentrant=False)
    return non


WAYS = [reentrant, nested, custom, in_rows, custom_in_checkpoint, alternately]
RUNS = pytest.mark.parametrize("run", WAYS)


class Net(nn.Module):
    """All layers are inside `run`, so the first gradient of a backward arrives in a nested task. Batches require no
    gradient, so the first block's input is set to require one.
    """

    def __init__(self, run: Run, inside: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.run = run
        self.inside = inside

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = x + self.run(lambda y, layer=layer: torch.tanh(layer(y)), x)  # type: ignore[misc]
        return x

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = self.trunk(x) if self.inside else self.run(self.whole, x.clone().requires_grad_())
        return F.mse_loss(out, targets)


def micro_steps(loop: Any) -> int | None:
    return loop.engine.micro_steps if hasattr(loop, "engine") else None


def counted(calls: Callable[[Any, Any], torch.Tensor], accumulation: int) -> Any:
    """Return the usual loop over `accumulation` micro-batches a step, each of which must count once."""

    def story(loop: Any) -> list[float]:
        seen = []
        for number, batch in enumerate(BATCHES):
            loss = calls(loop.model, batch)
            loop.backward(loss)
            loop.step()
            assert micro_steps(loop) in (None, (number + 1) % accumulation)
            seen.append(loss.item())
        return seen

    return story


@PLACES
@RUNS
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("inside", [True, False], ids=["layers", "all"])
def test_the_first_gradient_arrives_in_a_nested_task(
    inside: bool, accumulation: int, run: Run, place: dict[str, Any]
) -> None:
    story = counted(lambda model, batch: model(*batch), accumulation)
    assert_same_story(lambda: Net(run, inside), story, place={**place, "accumulation": accumulation}, units=6)


def by_parts(model: Any, batch: Any) -> torch.Tensor:
    """Call the layers from the loop, each under `run`."""
    x, targets = batch
    x = x.clone().requires_grad_()
    for layer in model.layers:
        x = x + model.run(lambda y, layer=layer: torch.tanh(layer(y)), x)
    return F.mse_loss(x, targets)


def in_one(model: Any, batch: Any) -> torch.Tensor:
    """Call the whole model and its loss under `run`."""
    x, targets = batch
    loss: torch.Tensor = model.run(lambda y: model(y, targets), x.clone().requires_grad_())
    return loss.mean()


@PLACES
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("calls", "run"),
    [(calls, run) for calls in (by_parts, in_one) for run in WAYS if (calls, run) != (in_one, in_rows)],
)
def test_parts_that_the_loop_calls(calls: Any, accumulation: int, run: Run, place: dict[str, Any]) -> None:
    story = counted(calls, accumulation)
    assert_same_story(lambda: Net(run), story, place={**place, "accumulation": accumulation}, units=6)


@SCHEDULES
@RUNS
def test_in_every_schedule(run: Run, update: str, tmp_path: Any) -> None:
    place = {"unit_size": 4096, "prefetch_bytes": 0, "update": update, "folder": tmp_path}
    assert_same_story(lambda: Net(run), counted(lambda model, batch: model(*batch), 1), place=place, units=6)


class Chunked(nn.Module):
    """Applies a head to chunks of rows, the loss of each under a checkpoint, as chunked cross entropy does."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 200, bias=False)
        self.run = run

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).logsumexp(1).sum()

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        total = sum(self.run(self.part, rows) for rows in x.split(1))
        return total / len(x)


@PLACES
@pytest.mark.parametrize("run", [reentrant, nested, custom, custom_in_checkpoint, alternately])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_head_in_chunks(accumulation: int, run: Run, place: dict[str, Any]) -> None:
    story = counted(lambda model, batch: model(*batch), accumulation)
    assert_same_story(lambda: Chunked(run), story, place={**place, "accumulation": accumulation}, units=3)


@PLACES
@RUNS
def test_a_backward_of_another_model_in_ours(run: Run, place: dict[str, Any]) -> None:
    """A backward of another model in a hook of ours is not counted."""

    def story(loop: Any) -> Any:
        torch.manual_seed(3)
        other = nn.Linear(32, 1)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

        def hook(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                other(gradient.detach()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def calls(model: Any, batch: Any) -> torch.Tensor:
            x, targets = batch
            out = model.trunk(x)
            out.register_hook(hook)
            return F.mse_loss(out, targets)

        return counted(calls, 1)(loop), other.weight.detach().clone()

    assert_same_story(lambda: Net(run), story, place=place, units=6)
