"""Sums, averages and norms of gradients, and arguments of the scheduler: as DeepSpeed's, against a plain loop.

SGD shows a factor of the gradients, which Adam would hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import UsageError
from support.models import Stack, seeded, token_batches

Opens = Callable[..., Any]

SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}


def plain(steps: Sequence[Sequence[Any]], divisor: int) -> tuple[nn.Module, float]:
    """Train a Stack with torch's SGD, each loss divided by `divisor`. Return it and the last gradient norm."""
    model = seeded(Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = 0.0
    for step in steps:
        for batch in step:
            (model(*batch) / divisor).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
    return model, norm


def same(engine: Any, model: nn.Module, norm: float) -> None:
    trained = engine.module_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", ["no_sync", "boundary"])
def test_micro_batches_add_up_without_accumulation(opens: Opens, way: str, stage: int) -> None:
    """`no_sync` and boundaries set by hand sum losses, since gradient_accumulation_steps is 1."""
    batches = token_batches(5)
    engine = opens(stage, **SGD)
    for batch, is_last in zip(batches, (False, False, True, False, True), strict=True):
        if way == "boundary":
            engine.set_gradient_accumulation_boundary(is_last)
        with engine.no_sync() if way == "no_sync" and not is_last else nullcontext():
            engine.backward(engine(*batch))
        if is_last:
            engine.step()
    assert engine.global_steps == 2
    same(engine, *plain([batches[:3], batches[3:]], 1))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", [0.0, 1e9])
def test_plain_backwards_are_averaged(opens: Opens, stage: int, clip: float) -> None:
    """`loss.backward()`, `engine.scale(loss).backward()` and `engine.backward(loss)` give the same gradients."""
    batches = token_batches(6)
    engine = opens(stage, gradient_accumulation_steps=3, **{**SGD, "gradient_clipping": clip})
    runs = [torch.Tensor.backward, lambda loss: engine.scale(loss).backward(), engine.backward]
    for number, batch in enumerate(batches):
        runs[(number + number // 3) % 3](engine(*batch))
        engine.step()
    same(engine, *plain([batches[:3], batches[3:]], 3))


def test_a_plain_backward_is_averaged_with_all_of_its_terms(opens: Opens) -> None:
    """A term of a parameter alone, and an output that is fed in again, are divided once."""
    engine = opens(model=seeded(lambda: nn.Linear(8, 8)), gradient_accumulation_steps=2, infinity={}, **SGD)
    model = seeded(lambda: nn.Linear(8, 8))
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def loss(call: Any, weight: torch.Tensor) -> torch.Tensor:
        return call(call(inputs)).square().mean() + weight.square().sum()

    for _ in range(2):
        loss(engine, engine.module.weight).backward()
        engine.step()
    loss(model, model.weight).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[name], value)


def test_a_plain_backward_in_fp16_needs_the_loss_scale(opens: Opens) -> None:
    """It is refused in its backward, and drops the gradients of the step's earlier micro-batches."""
    engine = opens(gradient_accumulation_steps=2, fp16={"enabled": True, "initial_scale_power": 4})
    [batch] = token_batches(1)
    engine.backward(engine(*batch))
    engine.step()
    with pytest.raises(UsageError, match="1 of 2 backwards of this step started from a loss that was not scaled"):
        engine(*batch).backward()
    for _ in range(2):
        engine.backward(engine(*batch))
        engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("divisor", [1, 2])
def test_unmanaged_accumulation_updates_in_every_step(opens: Opens, divisor: int, stage: int) -> None:
    """Steps of three and two backwards, divided by gradient_accumulation_steps, as DeepSpeed 0.19.8 does."""
    batches = token_batches(5)
    engine = opens(stage, gradient_accumulation_steps=divisor, managed_gradient_accumulation=False, **SGD)
    assert engine.managed_gradient_accumulation() is False
    samples = []
    for number, batch in enumerate(batches):
        engine.backward(engine(*batch)) if number % 2 else engine(*batch).backward()
        assert not engine.is_gradient_accumulation_boundary()
        if number in (2, 4):
            engine.step()
            assert engine.was_step_applied()
            samples.append(engine.global_samples)
    assert samples == [12, 20] and engine.micro_steps == 2
    same(engine, *plain([batches[:3], batches[3:]], divisor))
    with pytest.raises(UsageError, match="managed_gradient_accumulation is false"):
        engine.set_gradient_accumulation_boundary(True)


class Increments:
    """A scheduler like Megatron's, whose step needs the number of samples. Its rate is 0.01 per sample."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 10
        self.step(0)

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * self.samples

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def test_lr_kwargs_are_passed_to_the_scheduler(opens: Opens) -> None:
    """They reach `step` at boundaries only; arguments that do not fit raise before the update."""
    [batch] = token_batches(1)
    engine = opens(given={"lr_scheduler": Increments}, gradient_accumulation_steps=2)
    for increment in (1000, 4):
        engine.backward(engine(*batch))
        engine.step(lr_kwargs={"increment": increment})
    assert engine.get_lr() == [pytest.approx(0.14)]
    before = engine.module_state_dict()
    for _ in range(2):
        engine.backward(engine(*batch))
        engine.step({}) if engine.training_engine.micro_steps < 2 else None
    for given in (None, {"epoch": 1}):
        with pytest.raises(UsageError, match=r"Increments\.step\(\) .*engine\.step\(lr_kwargs=\{\"increment\": …\}\)"):
            engine.step(given)
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    engine.step({"increment": 1})
    assert engine.get_lr() == [pytest.approx(0.15)] and engine.global_steps == 2


def test_lr_kwargs_without_a_scheduler_have_no_effect(opens: Opens) -> None:
    [batch] = token_batches(1)
    engine = opens()
    engine.backward(engine(*batch))
    engine.step({"epoch": 3})
    assert engine.get_lr() == [1e-3]
