"""Runs the same loop with plain PyTorch and with an engine, and compares the results.

A story is a function that takes a `Loop` and returns its results (losses, values, errors). It may do anything a user
may: keep parameters, edit them, call parts. Both runs start from the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.config import Config
from infinity.engine.training import TrainingEngine
from support.configs import engine_config
from support.late_device import LateDevice
from support.lifetime import assert_nothing_leaked
from support.loops import open_engine, parameters_of
from support.models import seeded

MEMORY: dict[str, Any] = {"param": "none", "optim": "none"}
NVME: dict[str, Any] = {"unit_size": 4096, "prefetch_bytes": 0}
HOST: dict[str, Any] = {**NVME, "param": "cpu", "optim": "cpu"}
PLACES = pytest.mark.parametrize("place", [MEMORY, HOST, NVME], ids=["memory", "host", "nvme"])
LATE_TOO = pytest.mark.parametrize(
    "place", [MEMORY, HOST, NVME, {**NVME, "late": True}], ids=["memory", "host", "nvme", "late device"]
)
SCHEDULES = pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])


class Loop(Protocol):
    """The argument of a story."""

    model: Any

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...


Story = Callable[[Any], Any]


class PlainLoop:
    """Plain PyTorch with torch.optim.AdamW; 16-bit parameters have fp32 masters, which adopt the user's edits."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model: Any = model
        self._accumulation = config.resolve_batch(1).accumulation
        self._clip = config.gradient_clipping
        self._pairs = [(p, self._master(p)) for p in model.parameters() if p.requires_grad]
        params = config.optimizer.params
        self._optimizer = torch.optim.AdamW(
            [master for _, master in self._pairs],
            lr=params.lr,
            betas=params.betas,
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._backwards = 0

    @staticmethod
    def _master(parameter: nn.Parameter) -> torch.Tensor:
        if parameter.dtype in (torch.float32, torch.complex64):
            return parameter
        return parameter.detach().clone().float().requires_grad_()

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulation).backward()  # type: ignore[no-untyped-call]
        self._backwards += 1

    def step(self) -> None:
        if self._backwards < self._accumulation:
            return
        self._backwards = 0
        for parameter, master in self._pairs:
            if master is not parameter:
                with torch.no_grad():
                    master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if self._clip > 0:
            nn.utils.clip_grad_norm_([master for _, master in self._pairs], self._clip)
        with torch.device("cpu"):  # torch 2.11 creates counts of steps on the default device
            self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, master in self._pairs:
            if master is not parameter:
                with torch.no_grad():
                    parameter.copy_(master)


class EngineLoop:
    """The same interface to an engine."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self.model: Any = engine.module
        self.backward = engine.backward
        self.step = engine.step


def assert_same_story(
    make: Callable[[], nn.Module],
    story: Story,
    *,
    place: dict[str, Any],
    bf16: bool = False,
    units: int = 2,
    leaks: bool = False,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Assert that a story has equal results by both loops.

    leaks: views are kept at the end. units: least number of units, if not everything is in memory.
    """
    given = {**place, **options}
    late = given.pop("late", False)
    config = engine_config(bf16=bf16, **given)
    model = seeded(make)
    reference = PlainLoop(model.bfloat16() if bf16 else model, config)
    expected = story(reference)
    with open_engine(seeded(make), config, LateDevice() if late else None) as engine:
        assert len(engine.units) >= (units if "unit_size" in given else 1)
        found = story(EngineLoop(engine))
        assert_like(found, expected, tolerance)
        values = parameters_of(engine)
        if not leaks:
            assert_nothing_leaked(engine)
    for name, value in reference.model.named_parameters():
        torch.testing.assert_close(
            values[name], value.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_like(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Equal up to the order of sums; NaN equals nothing."""
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=number: f"value {n}: {m}"
            )
        elif isinstance(other, float):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance), f"value {number}"
        else:
            assert one == other, f"value {number}"


def training(batches: Any, extra: Callable[[Any, int], Any] = lambda loop, number: None) -> Story:
    """A story: the usual loop, with `extra(loop, number)` after each step, whose results are seen too."""

    def story(loop: Any) -> list[Any]:
        seen: list[Any] = []
        for number, batch in enumerate(batches):
            loss = loop.model(*batch)
            loop.backward(loss)
            loop.step()
            seen.append(loss.item())
            seen.append(extra(loop, number))
        return seen

    return story
