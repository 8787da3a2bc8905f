"""`engine.backward`'s arguments, and the boundaries of accumulation that the user sets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.errors import UsageError
from support.configs import engine_config
from support.loops import Result, assert_close, open_engine, parameters_of
from support.models import Stack, seeded, token_batches

UPDATES = pytest.mark.parametrize("update", ["during_backward", "next_forward", "after_backward"])
BATCHES = token_batches(12)


def plainly(sizes: list[int], divisor: int, repeats: int = 1) -> Result:
    """Train with steps of `sizes` micro-batches, each loss divided by `divisor` and counted `repeats` times."""
    model: Any = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses, batches = [], iter(BATCHES)
    for size in sizes:
        for _ in range(size):
            loss = model(*next(batches))
            (loss * repeats / divisor).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_backward_returns_what_it_differentiates(accumulation: int, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, accumulation=accumulation)
    with open_engine(seeded(Stack), config) as engine:
        loss = engine(*BATCHES[0])
        assert engine.backward(loss).item() == pytest.approx(loss.item() / accumulation)
        engine.step()
        loss = engine(*BATCHES[1])
        assert engine.backward(loss, scale_wrt_gas=False) is loss


@UPDATES
def test_a_loss_that_is_divided_already(update: str, tmp_path: Path) -> None:
    config = engine_config(folder=tmp_path, accumulation=2, update=update)
    with open_engine(seeded(Stack), config) as engine:
        losses = []
        for batch in BATCHES[:6]:
            loss = engine(*batch)
            engine.backward(loss / 2, scale_wrt_gas=False)
            engine.step()
            losses.append(loss.item())
            assert engine.parts.schedule.step.unscaled == 0
        assert_close(Result(losses, parameters_of(engine)), plainly([2, 2, 2], 2))


@pytest.mark.parametrize(
    ("accumulation", "how", "lines"),
    [
        (2, "plain", 1),
        (2, "divided already", 0),
        (2, "scaled", 0),
        (2, "averaged", 0),
        (2, "front end", 0),
        (2, "deepspeed", 0),
        (1, "plain", 0),
    ],
)
def test_plain_backwards_log_once_that_they_sum(
    accumulation: int, how: str, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain `loss.backward()` logs one line in all steps, which names the call that sums without it."""
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, accumulation=accumulation)) as engine:
        if how == "front end":
            engine.expect_divided_losses()
        engine.parts.schedule.step.averages_plain = how == "deepspeed"  # as `infinity.deepspeed` sets it
        for batch in BATCHES[:4]:
            loss = engine(*batch)
            if how == "divided already":
                engine.backward(loss / 2, scale_wrt_gas=False)
            elif how == "averaged":
                engine.backward(loss)
            else:
                (engine.scale(loss) if how == "scaled" else loss).backward()
            engine.step()
    found = [text for text in caplog.messages if "sums the gradients of a step's 2 micro-batches" in text]
    assert len(found) == lines
    assert all("engine.backward(loss, scale_wrt_gas=False)" in text for text in found)


def test_train_batch_logs_no_line_about_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole steps average, in both orders."""
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, accumulation=2)) as engine:
        engine.train_batch(iter(BATCHES))
        engine.train_batch(iter(BATCHES[2:]), blocks=list(engine.module.blocks))
    assert not [text for text in caplog.messages if "sums the gradients" in text]


@UPDATES
def test_a_retained_graph(update: str, tmp_path: Path) -> None:
    """A second backward of the same loss adds its gradients again."""
    config = engine_config(folder=tmp_path, accumulation=2, update=update)
    with open_engine(seeded(Stack), config) as engine:
        losses = []
        for batch in BATCHES[:3]:
            loss = engine(*batch)
            engine.backward(loss, retain_graph=True)
            engine.step()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.global_steps == 3
        assert_close(Result(losses, parameters_of(engine)), plainly([1, 1, 1], 2, repeats=2))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("steps", ["once", "always"])
@UPDATES
def test_boundaries_that_are_set(update: str, steps: str, stage: int, tmp_path: Path) -> None:
    """Steps of any number of micro-batches equal a plain loop that divides by gradient_accumulation_steps."""
    sizes = [3, 1, 2, 5, 1]
    place = ("nvme", "nvme") if stage == 3 else ("none", "cpu")
    config = engine_config(*place, folder=tmp_path, accumulation=3, update=update, stage=stage)
    with open_engine(seeded(Stack), config) as engine:
        losses, batches = [], iter(BATCHES)
        for done, size in enumerate(sizes):
            for number in range(size):
                engine.set_gradient_accumulation_boundary(number == size - 1)
                loss = engine(*next(batches))
                engine.backward(loss)
                losses.append(loss.item())
                assert engine.is_gradient_accumulation_boundary() == (number == size - 1)
                if steps == "always" and number < size - 1:
                    engine.step()
                assert engine.global_steps == done
            engine.step()
            assert engine.global_steps == done + 1
        assert_close(Result(losses, parameters_of(engine)), plainly(sizes, 3))


def test_boundaries_that_are_counted(tmp_path: Path) -> None:
    """The boundary is the same before forward, between backward and step, and in DeepSpeed."""
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, accumulation=3)) as engine:
        seen = []
        for batch in BATCHES[:6]:
            before = engine.is_gradient_accumulation_boundary()
            engine.backward(engine(*batch))
            assert engine.is_gradient_accumulation_boundary() == before
            seen.append(before)
            engine.step()
        assert seen == [False, False, True] * 2


PLACES = [(0, "none", "none"), (1, "none", "cpu"), (3, "nvme", "nvme")]
SIZES = [3, 1, 2]


def ended_by_hand(steps: str, **options: Any) -> Result:
    """Train with steps of `SIZES` micro-batches without gradient_accumulation_steps. steps: how all but the last are
    held back.
    """
    with open_engine(seeded(Stack), engine_config(**options)) as engine:
        losses, batches = [], iter(BATCHES)
        for size in SIZES:
            for number in range(size):
                is_last = number == size - 1
                if steps == "boundary":
                    engine.set_gradient_accumulation_boundary(is_last)
                with engine.no_sync() if steps == "no_sync" and not is_last else nullcontext():
                    loss = engine(*next(batches))
                    engine.backward(loss)
                losses.append(loss.item())
            engine.step()
        assert engine.global_steps == len(SIZES)
        return Result(losses, parameters_of(engine))


@UPDATES
def test_micro_batches_without_accumulation(update: str, tmp_path: Path) -> None:
    """Steps of several micro-batches equal a plain loop that sums, with the same bits wherever the states are."""
    expected = plainly(SIZES, 1)
    results = []
    for number, (stage, param, optim) in enumerate(PLACES):
        options = {"stage": stage, "update": update, "accumulation_buffers": number == 1}
        steps = "boundary" if number % 2 else "no_sync"
        results.append(ended_by_hand(steps, param=param, optim=optim, folder=tmp_path, **options))
        assert_close(results[-1], expected)
        assert results[-1].losses == results[0].losses, (stage, param, optim)
        for name, value in results[-1].parameters.items():
            assert torch.equal(value, results[0].parameters[name]), (stage, name)


@pytest.mark.parametrize("stage", [1, 3])
def test_sums_of_bf16_gradients_need_buffers(stage: int, tmp_path: Path) -> None:
    """Sums in fp32 are refused by the key that allocates them; with it, they have the bits of accumulation."""
    options: dict[str, Any] = {"folder": tmp_path, "bf16": True, "stage": stage, "param": "none", "optim": "cpu"}
    with open_engine(seeded(Stack), engine_config(**options)) as engine:
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(UsageError, match=r"boundary\(False\) accumulates .* set infinity\.accumulation_buffers"):
            engine.set_gradient_accumulation_boundary(False)
        with pytest.raises(UsageError, match=r"no_sync\(\) accumulates"), engine.no_sync():
            pass
    found = ended_by_hand("no_sync", accumulation_buffers=True, **options)
    assert ended_by_hand("boundary", accumulated_in="bf16", **options).losses != found.losses, "the dtype is seen"
    with open_engine(seeded(Stack), engine_config(accumulation=2, **options)) as engine:
        losses, batches = [], iter(BATCHES)
        for size in SIZES:
            for number in range(size):
                engine.set_gradient_accumulation_boundary(number == size - 1)
                losses.append(engine.backward(engine(*next(batches)), scale_wrt_gas=False).item())
            engine.step()
        assert losses == found.losses
        assert all(torch.equal(value, found.parameters[name]) for name, value in parameters_of(engine).items())


@pytest.mark.parametrize("divisor", [1, 2])
@UPDATES
def test_unmanaged_accumulation(update: str, divisor: int, tmp_path: Path) -> None:
    """Every `step` updates, and losses are divided by gradient_accumulation_steps as before."""
    for stage, param, optim in PLACES[1:] if divisor == 2 else PLACES[::2]:
        raw = engine_config(param, optim, folder=tmp_path, stage=stage, update=update, accumulation=divisor)
        config = Config.load({**raw.model_dump(exclude_unset=True), "managed_gradient_accumulation": False})
        with open_engine(seeded(Stack), config) as engine:
            losses, batches = [], iter(BATCHES)
            for size in SIZES:
                for _ in range(size):
                    loss = engine(*next(batches))
                    engine.backward(loss)
                    losses.append(loss.item())
                    assert not engine.is_gradient_accumulation_boundary()
                engine.step()
            assert engine.global_steps == len(SIZES)
            assert_close(Result(losses, parameters_of(engine)), plainly(SIZES, divisor))
            with pytest.raises(UsageError, match="managed_gradient_accumulation is false"):
                engine.set_gradient_accumulation_boundary(False)
            with pytest.raises(UsageError, match="without a backward"):
                engine.step()


def test_two_backwards_at_a_boundary(tmp_path: Path) -> None:
    with open_engine(seeded(Stack), engine_config(folder=tmp_path, accumulation=4)) as engine:
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(*BATCHES[0])
        engine.backward(loss)
        with pytest.raises(UsageError, match=r"twice before engine\.step"):
            engine.backward(loss)
