"""Ctrl-C at the end of a backward or of a step loses nothing: the retried loop trains as if it had not come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import OpenEngine
from support.beside import MEMORY
from support.models import Linears, seeded, vector_batches

BATCHES = vector_batches(5)


def once_interrupted(call: Callable[..., Any], at: Callable[[], bool]) -> Callable[..., Any]:
    """Return `call` preceded by a Ctrl-C at the first call for which `at()` holds."""
    interrupted = False

    def wrapped(*arguments: Any) -> Any:
        nonlocal interrupted
        if not interrupted and at():
            interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        return call(*arguments)

    return wrapped


def trained(engine: Any, interrupts: list[int]) -> list[torch.Tensor]:
    """Train on all batches, retrying a micro-batch that was interrupted. interrupts: receives their numbers."""
    for number, batch in enumerate(BATCHES):
        while engine.global_steps == number:
            try:
                if engine.micro_steps == 0:
                    engine.backward(engine(*batch))
                engine.step()
            except KeyboardInterrupt:
                interrupts.append(number)
    return [value for _, value in sorted(engine.state_dict().items())]


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_an_interrupt_at_the_end_of_a_backward(update: str, number: int, make_engine: OpenEngine) -> None:
    expected = trained(make_engine(seeded(Linears), **MEMORY, update=update), [])
    engine = make_engine(seeded(Linears), **MEMORY, update=update)
    runner = engine.updates.runner
    runner.send_all = once_interrupted(  # type: ignore[method-assign]
        runner.send_all, lambda: engine.global_steps == number
    )
    interrupts: list[int] = []
    assert all(map(torch.equal, trained(engine, interrupts), expected))
    assert interrupts == [number]


def test_an_interrupt_in_a_step_keeps_the_schedule(make_engine: OpenEngine) -> None:
    engine = make_engine(seeded(Linears), **MEMORY)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
    runner = engine.parts.runner
    runner.refresh_viewed = once_interrupted(  # type: ignore[method-assign]
        runner.refresh_viewed, lambda: engine.global_steps == 2
    )
    interrupts: list[int] = []
    trained(engine, interrupts)
    assert interrupts == [1]
    assert engine.lr_scheduler.last_epoch == engine.global_steps == len(BATCHES)
