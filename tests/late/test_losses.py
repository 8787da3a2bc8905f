"""A loss on the device is checked while its backward is issued, and before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import late
from infinity.comm.communicator import Communicator
from infinity.engine.loss_check import LossCheck, LossReader
from infinity.engine.training import TrainingEngine
from infinity.errors import NonFiniteError
from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import Batches, Result, assert_same, open_engine, parameters_of
from support.models import Stack, seeded, token_batches

BAD = 3
"""Number of the micro-batch whose loss is not finite."""
BATCHES = token_batches(6)
TIERS = [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")]

Spoil = Callable[[torch.Tensor], torch.Tensor]


def raises(loss: torch.Tensor) -> torch.Tensor:
    """Return NaN, whose backward raises: the exception follows from the loss."""

    def hook(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    spoiled = loss * math.nan
    spoiled.register_hook(hook)
    return spoiled


SPOILS: dict[str, Spoil] = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss + math.inf,  # its gradients are finite
    "raises": raises,
}


def train(engine: TrainingEngine, batches: Batches, spoil: Spoil) -> Result:
    """Return what remains of training in which micro-batch `BAD` is refused."""
    losses = []
    for number, batch in enumerate(batches):
        loss = engine(*batch)
        if number == BAD:
            with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf) in step .* \(on 1 of 1 ranks\)"):
                engine.backward(spoil(loss))
        else:
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    values = {name: value.cpu() for name, value in parameters_of(engine).items()}
    return Result(losses, values)


@cache
def on_cpu(spoil: Spoil = SPOILS["nan"], **options: Any) -> Result:
    with open_engine(seeded(Stack), engine_config(prefetch_bytes=20_000, **options)) as engine:
        return train(engine, BATCHES, spoil)


def on_device(spoil: Spoil, param: str, optim: str, **options: Any) -> Result:
    device = LateAccelerator()
    batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
    with open_engine(seeded(Stack), engine_config(param, optim, prefetch_bytes=20_000, **options), device) as engine:
        return train(engine, batches, spoil)


@pytest.mark.parametrize("param, optim", TIERS)
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_loss_that_is_not_finite_changes_nothing(lazy: None, spoil: str, param: str, optim: str) -> None:
    """The batch can be skipped, also if a hook of its backward fails at the NaN."""
    assert_same(on_device(SPOILS[spoil], param, optim), on_cpu())


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_bad_loss_keeps_the_gradients_of_earlier_micro_batches(lazy: None, accumulation: int, clip: float) -> None:
    options = {"bf16": True, "clip": clip, "accumulation": accumulation}
    assert_same(on_device(SPOILS["inf"], "cpu", "cpu", **options), on_cpu(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_check_waits_for_the_loss(lazy: None, dtype: torch.dtype) -> None:
    device = LateAccelerator()
    reader, ranks = LossReader(device), Communicator(device)
    for value, finite in [(1.0, True), (math.inf, False), (-2.0, True), (math.nan, False)]:
        loss = torch.ones((), dtype=dtype, device=device.torch_device) * value
        assert reader.can_read(loss)
        assert LossCheck(reader, loss, ranks, 0).passed() == finite


def test_backward_begins_before_the_loss_is_known(lazy: None) -> None:
    """Every unit has a buffer, so that nothing else is waited for."""
    device = LateAccelerator()
    config = engine_config("cpu", "cpu", debug=False, prefetch_bytes="1GiB", update="next_forward")
    with open_engine(seeded(Stack), config, device) as engine:
        batches = [tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES]
        for batch in batches[:3]:
            engine.backward(engine(*batch))
            engine.step()
        loss = engine(*batches[3])
        before, seen = late.counters(), []
        loss.register_hook(lambda gradient: seen.append(late.counters()))
        engine.backward(loss)
        assert seen[0].waits == before.waits
        assert seen[0].kernels_executed == before.kernels_executed
