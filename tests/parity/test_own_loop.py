"""Users' own loops work as with a torch optimizer: `loss.backward()`, `optimizer.step(closure)`, `zero_grad`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.engine.training import TrainingEngine
from infinity.errors import UsageError
from support.configs import engine_config
from support.loops import Batches, Result, assert_close, assert_same, distance, open_engine, parameters_of
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(8)
FP16 = {"loss_scale": 256}
SGD: dict[str, Any] = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.0}
"""SGD, because its step is proportional to the gradient; Adam's is not."""
DTYPES = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": FP16}}
WITHIN = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def plain(dtype: str, divided_by: float) -> Result:
    """Train by SGD over fp32 masters, with gradients of `loss / divided_by` summed over two micro-batches a step."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    masters, model = seeded(Stack), seeded(Stack).to(kind)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.5)
    losses = []
    for number, batch in enumerate(BATCHES, 1):
        loss = model(*batch)
        (loss / divided_by).backward()
        losses.append(loss.item())
        for master, param in zip(masters.parameters(), model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
            param.grad = None
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(masters.state_dict())
    return Result(losses, {name: p.detach().float() for name, p in model.named_parameters()})


def ours(dtype: str, how: str, folder: Path, update: str = "auto") -> Result:
    config = engine_config(folder=folder, accumulation=2, update=update, **SGD, **DTYPES[dtype])
    with open_engine(seeded(Stack), config) as engine:
        losses = []
        for batch in BATCHES:
            loss = engine(*batch)
            losses.append(loss.item())
            if how == "engine":
                engine.backward(loss)
            elif how == "scaled":
                engine.scale(loss).backward()
            elif how == "scaled sum":
                engine.scale(loss * 2).backward()
            else:
                loss.backward()
            engine.step()
        return Result(losses, {name: p.float() for name, p in parameters_of(engine).items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_losses_are_averaged(dtype: str, tmp_path: Path) -> None:
    """`engine.backward(loss)` and `engine.scale(loss).backward()` both average, bit-identically."""
    found = ours(dtype, "engine", tmp_path)
    assert_same(ours(dtype, "scaled", tmp_path), found)
    assert_close(found, plain(dtype, 2.0), loss=WITHIN[dtype], parameters=WITHIN[dtype])


@pytest.mark.parametrize(
    ("dtype", "update"), [("fp32", "auto"), ("fp32", "next_forward"), ("bf16", "auto"), ("fp16", "")]
)
def test_plain_losses_are_summed(dtype: str, update: str, tmp_path: Path) -> None:
    """Plain `loss.backward()` sums, as in PyTorch. fp16 refuses it, and sums `engine.scale(loss * 2)` instead."""
    if dtype == "fp16":
        with pytest.raises(UsageError, match=r"2 of 2 backwards.*not scaled by 256.*engine.scale\(loss\).backward"):
            ours(dtype, "plain", tmp_path)
        found = ours(dtype, "scaled sum", tmp_path)
    else:
        found = ours(dtype, "plain", tmp_path, update)
    assert_close(found, plain(dtype, 1.0), loss=WITHIN[dtype], parameters=WITHIN[dtype])
    assert distance(found, plain(dtype, 1.0)) < 0.2 * distance(found, plain(dtype, 2.0))


def test_one_micro_batch_without_the_scale_is_refused(tmp_path: Path) -> None:
    """An unscaled backward is refused at any place of a step, also after scaled losses without a backward."""
    config = engine_config(folder=tmp_path, accumulation=2, fp16=FP16, **SGD)
    expected = ours("fp16", "engine", tmp_path)
    with open_engine(seeded(Stack), config) as engine:
        for order in ([True, False], [False, True]):
            for batch, scaled in zip(BATCHES, order, strict=False):
                loss = engine(*batch)
                (engine.scale(loss) if scaled else loss).backward()
            with pytest.raises(UsageError, match="1 of 2 backwards"):
                engine.step()
        engine.scale(engine(*BATCHES[0]))  # its backward never runs
        for batch in BATCHES[:2]:
            engine(*batch).backward()
        with pytest.raises(UsageError, match="2 of 2 backwards"):
            engine.step()
        losses = []
        for batch in BATCHES:
            loss = engine.scale(engine(*batch))
            if len(losses) % 2 == 0:
                engine.optimizer.zero_grad()  # between the scale and the backward, as a loop may do
            losses.append(loss.item() / FP16["loss_scale"] * 2)
            loss.backward()
            engine.step()
        assert losses == expected.losses


def closures(engine: Any, optimizer: torch.optim.Optimizer, batches: Batches, accumulation: int) -> list[float]:
    """Train as Lightning does: forward, zero_grad and backward in a closure, passed to `step` in the last one."""
    losses = []
    for number, batch in enumerate(batches):

        def closure(batch: Any = batch, first: bool = number % accumulation == 0) -> torch.Tensor:
            assert torch.is_grad_enabled()
            loss: torch.Tensor = engine(*batch)
            if first:
                optimizer.zero_grad()
            (loss / accumulation).backward()
            return loss.detach()

        if (number + 1) % accumulation:
            loss = closure()
        else:
            with torch.no_grad():
                loss = optimizer.step(closure)  # type: ignore[arg-type, assignment]
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("update", ["auto", "next_forward", "after_backward"])
def test_closures(accumulation: int, update: str, tmp_path: Path) -> None:
    """Closures train as with torch's AdamW, and `step` returns the closure's value."""
    config = engine_config(folder=tmp_path, accumulation=accumulation, update=update, eps=1e-6)
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)
    expected = closures(model, optimizer, BATCHES, accumulation)
    with open_engine(seeded(Stack), config) as engine:
        found = Result(closures(engine, engine.optimizer, BATCHES, accumulation), parameters_of(engine))
        assert (engine.global_steps, engine.micro_steps) == (len(BATCHES) // accumulation, 0)
        if accumulation == 2:  # an epoch ends in mid-step: `step` uses the gradients so far, as in torch
            closures(engine, engine.optimizer, BATCHES[:1], 1)
    assert_close(found, Result(expected, {name: p.detach() for name, p in model.named_parameters()}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_gradients_changes_nothing(dtype: str, tmp_path: Path) -> None:
    """Steps after a closure without backward, or after `zero_grad`, change nothing, as in torch."""
    config = engine_config(folder=tmp_path, update="next_forward", **DTYPES[dtype])
    with open_engine(seeded(Stack), config) as engine:
        before = parameters_of(engine)
        assert engine.optimizer.step(lambda: None) is None
        engine.backward(engine(*BATCHES[0]))
        engine.optimizer.zero_grad()
        engine.optimizer.step()
        assert engine.global_steps == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


def test_a_closure_that_fails(tmp_path: Path) -> None:
    """A step after a closure that failed in mid-backward is refused, since its gradients are incomplete."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise KeyError("on purpose")

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x)
        return Fails.apply(out) if failing and block is model.blocks[2] else out  # type: ignore[no-any-return]

    failing = True
    model = seeded(lambda: Stack(run=run))
    with open_engine(model, engine_config(folder=tmp_path, update="next_forward")) as engine:
        before = parameters_of(engine)
        with pytest.raises(KeyError):
            closures(engine, engine.optimizer, BATCHES[:1], 1)
        with pytest.raises(UsageError, match="a backward that failed"):
            engine.optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        failing = False
        losses = closures(engine, engine.optimizer, BATCHES[:3], 1)
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, update="next_forward")) as engine:
        assert closures(engine, engine.optimizer, BATCHES[:3], 1) == losses


def used(engine: TrainingEngine) -> None:
    """Train two steps, then run a backward that updates units."""
    for batch in BATCHES[:2]:
        engine.backward(engine(*batch))
        engine.step()
    engine.backward(engine(*BATCHES[2]))
    assert engine.parts.schedule.step.updated


def test_gradients_that_units_were_updated_with_are_not_dropped(tmp_path: Path) -> None:
    """Gradients that updated units cannot be dropped: all calls raise. A load drops them: it replaces every state."""
    config = engine_config(folder=tmp_path, update="during_backward")
    with open_engine(seeded(Stack), config) as engine:
        used(engine)
        engine.step()
        expected = parameters_of(engine)
    with open_engine(seeded(Stack), config) as engine:
        used(engine)
        for call in (engine.drop_gradients, engine.optimizer.zero_grad):
            with pytest.raises(
                UsageError, match=r'already updated.*engine.step\(\).*infinity.update to "next_forward"'
            ):
                call()
        with pytest.raises(UsageError, match=r"holds no gradients: make it after engine.step\(\)"):
            engine.save_checkpoint(tmp_path / "saved")
        engine.step()
        found = parameters_of(engine)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        engine.save_checkpoint(tmp_path / "saved")
        used(engine)
        engine.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())


def test_dropped_gradients_leave_no_trace(tmp_path: Path) -> None:
    """`drop_gradients` in mid-step, which the error of a save suggests, leaves training bit-identical."""
    config = engine_config(folder=tmp_path, accumulation=4)
    results = []
    for dropped in (False, True):
        with open_engine(seeded(Stack), config) as engine:
            if dropped:
                engine.backward(engine(*BATCHES[7]))
                with pytest.raises(UsageError, match=r"1 of 4 micro-batches are collected.*engine.drop_gradients\(\)"):
                    engine.save_checkpoint(tmp_path / "saved")
                engine.drop_gradients()
                engine.save_checkpoint(tmp_path / "saved")
            losses = []
            for batch in BATCHES:
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results.append(Result(losses, parameters_of(engine)))
    assert_same(*results)
