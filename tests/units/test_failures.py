"""An exception anywhere in a step leaks no buffer and no hold, and training continues as without the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import OpenEngine
from infinity.errors import UsageError
from support.configs import engine_config
from support.lifetime import assert_nothing_leaked
from support.loops import Result, assert_close, open_engine, parameters_of, plain, train
from support.models import Block, Stack, seeded, token_batches

BATCHES = token_batches(6)


class Trouble(Exception):
    pass


class Interrupt(KeyboardInterrupt):
    """An exception that is no Exception, like Ctrl-C."""


class Failing(Block):
    """Raises in forward or in backward on request."""

    where: str = ""
    error: type[BaseException] = Trouble
    recomputed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" or (self.where == "recompute" and torch._C._current_graph_task_id() != -1):
            raise self.error("in " + self.where)
        out = super().forward(x)
        if self.where == "late forward":
            raise self.error("in " + self.where)
        if self.where == "backward" and out.requires_grad:
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: torch.Tensor) -> None:
        raise self.error("in backward")


def failing(run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> Stack:
    model = Stack(run=run)
    model.blocks = nn.ModuleList(Failing(32) for _ in range(6))
    return model


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def not_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return out


PLACES = [
    (None, "forward"),
    (None, "late forward"),
    (None, "backward"),
    (reentrant, "forward"),
    (reentrant, "recompute"),
    (reentrant, "backward"),
    (not_reentrant, "late forward"),
    (not_reentrant, "recompute"),
    (not_reentrant, "backward"),
]


@pytest.mark.parametrize("error", [Trouble, Interrupt])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("run", "where"), PLACES)
def test_training_goes_on(
    run: Callable[..., Any] | None, where: str, accumulation: int, error: type[BaseException]
) -> None:
    """A step fails twice and is repeated. Updates wait for the next forward, so a failed backward changes nothing."""
    config = engine_config(update="next_forward", prefetch_bytes=0, accumulation=accumulation)
    expected = plain(seeded(lambda: failing(run)), BATCHES, config)
    with open_engine(seeded(lambda: failing(run)), config) as engine:
        block = engine.module.blocks[3]
        block.error = error
        losses = []
        number, failures = 0, 0
        while number < len(BATCHES):
            block.where = where if number == 2 + accumulation - 1 and failures < 2 else ""
            try:
                loss = engine(*BATCHES[number])
                engine.backward(loss)
            except error:
                failures += 1
                block.where = ""
                # Gradients accumulated before are dropped with the failed backward.
                if where not in ("forward", "late forward") and accumulation == 2:
                    number -= 1
                    losses.pop()
                continue
            engine.step()
            losses.append(loss.item())
            number += 1
        assert failures == 2
        result = Result(losses, parameters_of(engine))
        del loss
        assert not engine.parts.store.kept.warned
        assert_nothing_leaked(engine)
    assert_close(result, expected)


def test_a_backward_that_fails_before_its_first_gradient(make_engine: OpenEngine) -> None:
    """The failed backward ends the step: gradients accumulated before are dropped."""
    config = engine_config(update="next_forward", accumulation=2)
    engine = make_engine(seeded(Stack), config)

    def fail(gradient: torch.Tensor) -> None:
        raise Trouble

    engine.backward(engine(*BATCHES[0]))
    engine.step()
    hook = engine.module.head.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    loss = engine(*BATCHES[1])
    with pytest.raises(Trouble):
        engine.backward(loss)
    hook.remove()
    losses = train(engine, BATCHES[:4])
    assert_close(Result(losses, parameters_of(engine)), plain(seeded(Stack), BATCHES[:4], config))


def test_a_backward_that_failed_after_updates_stops_the_engine(make_engine: OpenEngine) -> None:
    """Later blocks are updated before earlier ones fail. Half a step cannot be undone, so the engine raises."""
    engine = make_engine(seeded(failing))
    for batch in BATCHES[:3]:
        engine.backward(engine(*batch))
        engine.step()
    engine.module.blocks[1].where = "backward"
    with pytest.raises(Trouble):
        engine.backward(engine(*BATCHES[3]))
    with pytest.raises(UsageError, match="make a new one and load the last checkpoint"):
        engine(*BATCHES[3])


def test_a_failed_forward_in_eval_leaves_training_alone(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(failing), prefetch_bytes=0)
    engine.backward(engine(*BATCHES[0]))
    engine.step()
    engine.module.blocks[2].where = "forward"
    for _ in range(3):
        with torch.no_grad(), pytest.raises(Trouble):
            engine(*BATCHES[1])
    engine.module.blocks[2].where = ""
    engine.backward(engine(*BATCHES[1]))
    engine.step()
    assert_nothing_leaked(engine)
