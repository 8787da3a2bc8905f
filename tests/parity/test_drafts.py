"""Drafts give the bits of updates that wait for the norm, whether steps are clipped, overflow, or neither."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import infinity
from infinity.engine.training import TrainingEngine
from infinity.plan import drafts
from infinity.schedule import speculation
from infinity.tier_kind import TierKind
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import use_late_disks
from support.loops import Result, assert_close, assert_same, open_engine, parameters_of, plain
from support.models import Stack, seeded, token_batches
from support.states import states_of

STEPS = 9
PLACES = {
    "nvme": ("nvme", "nvme", {}, False),
    "parameters in memory": ("cpu", "nvme", {}, False),
    "late device, host": ("cpu", "cpu", {"memory": {"host": "64MiB"}}, True),
    "late device, stage 2": ("none", "cpu", {"stage": 2, "memory": {"host": "64MiB"}}, True),
    "late device, nvme": ("nvme", "nvme", {}, True),
    "late device, optimizer in memory": ("nvme", "cpu", {"memory": {"host": "64MiB"}}, True),
}
"""Tiers of parameters and optimizer states, keys, and whether the device has memory of its own."""

SCALED: dict[str, Sequence[int]] = {"none": (), "every": range(STEPS), "some": (3, 6, 7)}
"""Steps whose gradients are clipped or overflow."""


def stack() -> Stack:
    return seeded(lambda: Stack(depth=5))


class Count:
    """Drafts that were made and kept, by step."""

    def __init__(self, engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.kept: list[int] = []
        runner = engine.updates.runner
        decide = runner._decide

        def counted(scale: float) -> list[int]:
            self.made.append(len(runner._drafts))
            kept = decide(scale)
            self.kept.append(len(kept))
            return kept

        monkeypatch.setattr(runner, "_decide", counted)


def large(step: int, scaled: Sequence[int]) -> float:
    """Return the factor of a step's loss with which its gradients are clipped, or are not."""
    return 1e3 if step in scaled else 1e-3


def run(
    folder: Path,
    place: str,
    scaled: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    accumulation: int = 1,
    between: Callable[[TrainingEngine, int], None] = lambda engine, step: None,
    **options: Any,
) -> tuple[Result, Count]:
    """Train with clipping. between: called between the last backward of a step and its `step()`."""
    param, optim, keys, late = PLACES[place]
    if place == "parameters in memory":  # a limit would let optimizer states stay there first
        monkeypatch.setattr(drafts, "_room", lambda *_: dict.fromkeys(TierKind, float("inf")))
    config = engine_config(param, optim, folder=folder, accumulation=accumulation, **{"clip": 1.0, **keys, **options})
    losses, norms = [], []
    with open_engine(stack(), config, LateDevice(delay=0.002) if late else None) as engine:
        count = Count(engine, monkeypatch)
        for number, batch in enumerate(token_batches(STEPS * accumulation)):
            loss = engine(*batch) * large(number // accumulation, scaled)
            engine.backward(loss)
            losses.append(loss.item())
            if (number + 1) % accumulation == 0:
                between(engine, number // accumulation)
            engine.step()
            norms.append(engine.grad_norm or 0.0)
        return Result(losses + norms, parameters_of(engine) | states_of(engine)), count


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts be tried again at once."""
    monkeypatch.setattr(speculation, "PATIENCE", 0)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.usefixtures("patient")
def test_drafts_have_the_bits_of_updates_in_the_next_forward(
    place: str, scaled: str, accumulation: int, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"bf16": bf16, "accumulation": accumulation, "moments": "8bit" if bf16 else "fp32"}
    expected, none = run(tmp_path, place, SCALED[scaled], monkeypatch, speculate=False, **options)
    found, count = run(tmp_path, place, SCALED[scaled], monkeypatch, **options)
    assert_same(found, expected)
    assert not any(none.made)
    for step, (made, kept) in enumerate(zip(count.made, count.kept, strict=True)):
        assert made or not step, f"no draft in step {step}"
        assert kept == (0 if step in SCALED[scaled] else made)


@pytest.mark.parametrize("scaled", SCALED)
def test_drafts_train_as_a_plain_loop(scaled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(folder=tmp_path, clip=1.0)
    batches = token_batches(STEPS)
    numbers = {id(batch): number for number, batch in enumerate(batches)}

    def loss_of(model: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        loss: torch.Tensor = model(*batch) * large(numbers[id(batch)], SCALED[scaled])
        return loss

    expected = plain(stack(), batches, config, loss_of)
    found, _ = run(tmp_path, "nvme", SCALED[scaled], monkeypatch)
    trained = {name: found.parameters[name] for name in expected.parameters}
    assert_close(Result(found.losses[:STEPS], trained), expected, loss=1e-5)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("place", ["nvme", "late device, host", "late device, stage 2"])
def test_overflows_take_drafts_back(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for speculate in (False, "auto"):
        options = {"fp16": {"initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}, "clip": 0.0}
        result, count = run(tmp_path, place, (), monkeypatch, speculate=speculate, **options)
        results.append(result)
    assert_same(results[1], results[0])
    assert sum(count.kept) and len(count.kept) < STEPS, "no step overflowed"


def test_a_run_that_is_always_clipped_makes_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, count = run(tmp_path, "nvme", range(STEPS), monkeypatch)
    assert not any(count.made)


def test_steps_that_begin_to_be_clipped_make_drafts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gradients that exceed the limit stop the drafts of their step, and the step those of the next."""
    _, count = run(tmp_path, "nvme", range(3, STEPS), monkeypatch)
    assert [bool(kept) for kept in count.kept] == [False, True, True, *[False] * 6]
    assert not any(count.made[4:])


def test_drafts_are_tried_again_after_steps_without_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, count = run(tmp_path, "nvme", (2,), monkeypatch)
    assert [bool(kept) for kept in count.kept] == [False, True, *[False] * 5, True, True]


def weights(engine: TrainingEngine) -> list[torch.nn.Parameter]:
    """Matrices of two neighbours: at least one has drafts, with second slots for three of four units."""
    return [engine.module.blocks[k].up.weight for k in (2, 3)]


def read_a_parameter(engine: TrainingEngine, step: int) -> None:
    """Read parameters before their step, as code that logs norms of weights does."""
    if step % 2:
        for weight in weights(engine):
            weight.norm().item()


def read_them_all(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        parameters_of(engine)


def read_states(engine: TrainingEngine, step: int) -> None:
    if step % 2:
        for weight in weights(engine):
            infinity.get_full_optimizer_state(weight, "exp_avg")


def edit_states(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        for weight in weights(engine):
            state = infinity.get_full_optimizer_state(weight, "exp_avg")
            infinity.set_full_optimizer_state(weight, "exp_avg", state * 0.5)


def run_forward(engine: TrainingEngine, step: int) -> None:
    if step % 2:
        with torch.no_grad():
            engine(*token_batches(1)[0])


def edit_a_parameter(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        with torch.no_grad():
            for weight in weights(engine):
                weight.mul_(0.5)


def edit_a_gradient(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        for weight in weights(engine):
            gradient = infinity.get_full_grad(weight)
            assert gradient is not None
            infinity.set_full_grad(weight, gradient * 0.5)


def change_the_rate(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        engine.optimizer.param_groups[0]["lr"] *= 0.5


def drop_the_gradients(engine: TrainingEngine, step: int) -> None:
    """Begin the step anew."""
    if step in (3, 4):
        engine.drop_gradients()
        engine.backward(engine(*token_batches(1)[0]) * 1e-3)


def fail_in_backward(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        engine.drop_gradients()
        out = engine.module.embedding(token_batches(1)[0][0]).detach().requires_grad_()
        stop = out * 1.0
        stop.register_hook(lambda gradient: 1 / 0)
        x = stop
        with pytest.raises(ZeroDivisionError):
            loss = sum(block(x).float().square().mean() for block in engine.module.blocks)
            engine.backward(loss)  # type: ignore[arg-type]
        engine.backward(engine(*token_batches(1)[0]) * 1e-3)


def go_backward_twice(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        engine.backward(engine(*token_batches(1)[0]) * 1e-3)


def go_backward_in_part_at_another_rate(engine: TrainingEngine, step: int) -> None:
    if step in (3, 4):
        engine.optimizer.param_groups[0]["lr"] *= 0.5
        x = engine.module.blocks[0](engine.module.embedding(token_batches(1)[0][0]))
        engine.backward(x.square().mean() * 1e-3)


@pytest.mark.every_case
@pytest.mark.parametrize("place", ["nvme", "late device, host", "late device, stage 2"])
@pytest.mark.parametrize(
    "between",
    [
        read_a_parameter,
        read_them_all,
        read_states,
        edit_states,
        run_forward,
        edit_a_parameter,
        edit_a_gradient,
        change_the_rate,
        drop_the_gradients,
        fail_in_backward,
        go_backward_twice,
        go_backward_in_part_at_another_rate,
    ],
)
def test_what_happens_before_the_step_meets_no_draft(
    between: Callable[[TrainingEngine, int], None], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(tmp_path, place, (), monkeypatch, between=between, speculate=False)
    found, count = run(tmp_path, place, (), monkeypatch, between=between)
    assert_same(found, expected)
    assert sum(map(bool, count.kept)) > 2


class Shift(torch.nn.Module):
    """Adds a vector, whose gradient needs no saved tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(width))
        self.out = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out = x + self.by
        return self.out


class Nested(Stack):
    """A hook runs a second backward inside of that of step 4, once the blocks have their gradients."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.step = -1
        for block in self.blocks:
            block.norm = torch.nn.Sequential(block.norm, Shift(32))
        self.embedding.register_forward_hook(self._hook)

    def _hook(self, module: torch.nn.Module, arguments: object, x: torch.Tensor) -> None:
        self.step += torch.is_grad_enabled()
        if self.step == 4:
            x.register_hook(lambda _: self._again())

    def _again(self) -> None:
        for block in self.blocks:
            out = block.norm[1].out
            torch.autograd.backward(out, torch.full_like(out, 1e-4), inputs=[block.norm[1].by])


@pytest.mark.parametrize("place", ["nvme", "late device, host", "late device, stage 2"])
def test_a_backward_inside_of_a_backward_meets_no_draft(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients reach units without a use, which the trace of the steps before does not show."""
    monkeypatch.setitem(run.__globals__, "stack", lambda: seeded(Nested))
    expected, _ = run(tmp_path, place, (), monkeypatch, speculate=False)
    found, count = run(tmp_path, place, (), monkeypatch)
    assert_same(found, expected)
    assert sum(map(bool, count.kept)) > 2


def test_late_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes that happen when something waits for them."""
    use_late_disks(monkeypatch)
    source = random.Random(0)
    scaled = [step for step in range(STEPS) if source.random() < 0.4]
    monkeypatch.setattr(speculation, "PATIENCE", 1)
    expected, _ = run(tmp_path, "nvme", scaled, monkeypatch, speculate=False)
    found, count = run(tmp_path, "nvme", scaled, monkeypatch)
    assert_same(found, expected)
    assert any(count.kept) and count.kept != count.made


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("clip", [1e3, 0.5], ids=["none", "every"])
def test_micro_batches_that_pass_the_blocks_together(
    clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of the last micro-batch's backward drafts the units that it passes."""
    results = []
    for speculate in ("auto", False):
        config = engine_config(folder=tmp_path, clip=clip, accumulation=3, unit_size=20_000, speculate=speculate)
        with open_engine(stack(), config) as engine:
            count = Count(engine, monkeypatch)
            batches = iter(token_batches(4 * 3))
            losses = [engine.train_batch(batches, blocks=engine.module.blocks).item() for _ in range(4)]
            results.append(Result(losses, parameters_of(engine) | states_of(engine)))
        assert any(count.made) == (speculate == "auto")
        assert any(count.kept) == (speculate == "auto" and clip > 1)
    assert_same(*results)


def test_a_draft_that_could_not_start_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run(tmp_path, "nvme", (), monkeypatch, speculate=False)

    def fail_once(engine: TrainingEngine, step: int) -> None:
        if step != 3:
            return
        engine.drop_gradients()
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine.updates.runner._updating, "place", Mock(side_effect=MemoryError))
            engine.backward(engine(*token_batches(step + 1)[step]) * large(step, ()))
        engine.drop_gradients()
        engine.backward(engine(*token_batches(step + 1)[step]) * large(step, ()))

    found, count = run(tmp_path, "nvme", (), monkeypatch, between=fail_once)
    assert_same(found, expected)
    assert sum(map(bool, count.kept)) > 2


class Stop(torch.autograd.Function):
    """Passes values and gradients on, unless it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Stop.armed:
            raise ZeroDivisionError
        return gradient


@pytest.mark.usefixtures("patient")
def test_a_failed_backward_of_micro_batches_together_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Stack):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = Stop.apply(self.embedding(tokens))
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    results = []
    for speculate in ("auto", False):
        config = engine_config(folder=tmp_path, clip=1e3, accumulation=3, unit_size=20_000, speculate=speculate)
        with open_engine(seeded(lambda: Stopped(depth=5)), config) as engine:
            count, batches, losses = Count(engine, monkeypatch), iter(token_batches(6 * 3)), list[float]()
            for step in range(5):
                if step == 3:
                    monkeypatch.setattr(Stop, "armed", True)
                    with pytest.raises(ZeroDivisionError):
                        engine.train_batch(batches, blocks=engine.module.blocks)
                    monkeypatch.setattr(Stop, "armed", False)
                    engine.drop_gradients()
                losses.append(engine.train_batch(batches, blocks=engine.module.blocks).item())
            results.append(Result(losses, parameters_of(engine) | states_of(engine)))
        assert any(count.kept) == (speculate == "auto")
    assert_same(*results)
