"""Edits of parameters whose update is still being written back are not lost to the late write."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from conftest import OpenEngine
from infinity.tiers.transfer import Promise
from infinity.units.unit import Unit
from support.configs import engine_config
from support.late_disk import use_late_disks
from support.loops import Result, assert_same, open_engine, parameters_of, train
from support.models import VOCABULARY, Linears, Stack, seeded, token_batches, vector_batches
from support.seeded_disk import Schedule, use_seeded_disks

BATCHES = token_batches(6)
KINDS = pytest.mark.parametrize(
    ("bf16", "master"), [(False, "fp32"), (True, "remainder"), (True, "fp32")], ids=["fp32", "remainder", "master"]
)


def halve(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("blocks.1.up.weight").mul_(0.5)
        module.get_parameter("head.weight").clamp_(-0.1, 0.1)


class Renormed(Stack):
    """An embedding that its own forward edits, right after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, max_norm=0.5)


@KINDS
@pytest.mark.parametrize("prefetch", [0, "auto"])
@pytest.mark.parametrize("lr", [0.0, 1e-3])
def test_an_edit_right_after_the_step(
    bf16: bool, master: str, prefetch: int | str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, settle: bool) -> Result:
        options = {"bf16": bf16, "master": master, "prefetch_bytes": prefetch, "lr": lr, "weight_decay": 0.0}
        with open_engine(seeded(Stack), engine_config(**options)) as engine:
            losses = train(engine, BATCHES[:2])
            if settle:
                engine.settle()
            halve(engine.module)
            return Result(losses + train(engine, BATCHES[2:4]), parameters_of(engine))

    expected = run(settle=True)
    use_late_disks(monkeypatch)
    assert_same(run(settle=False), expected)


@KINDS
@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_an_edit_in_the_forward_after_the_step(
    bf16: bool, master: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, settle: bool) -> Result:
        options = {"bf16": bf16, "master": master, "prefetch_bytes": 0, "lr": 1e-2, "update": update}
        with open_engine(seeded(Renormed), engine_config(**options)) as engine:
            losses = []
            for batch in BATCHES:
                losses += train(engine, [batch])
                if settle:
                    engine.settle()
            return Result(losses, parameters_of(engine))

    expected = run(settle=True)
    use_late_disks(monkeypatch)
    assert_same(run(settle=False), expected)


def hold_updates(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make updates write to disk only once this event is set, which gives up after 30 seconds."""
    waited_for = threading.Event()

    def hold() -> None:
        if threading.current_thread().name == "infinity-update":
            waited_for.wait(timeout=30)
            waited_for.set()

    use_seeded_disks(monkeypatch, Schedule(0, drift=0, before_write=hold))
    return waited_for


def set_when_awaited(waited_for: threading.Event, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the event when a thread waits for the end of the unit's update."""
    wait = Promise.wait

    def watched(promise: Promise) -> None:
        if unit.update is not None and promise is unit.update.done:
            waited_for.set()
        wait(promise)

    monkeypatch.setattr(Promise, "wait", watched)


def test_data_is_assigned_while_the_update_is_written(make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write in flight references the buffer and is not a kept view, so the engine waits for it."""
    waited_for = hold_updates(monkeypatch)
    batch, *_ = vector_batches(1, width=96)
    engine = make_engine(seeded(lambda: Linears(96, depth=1)), unit_size="64MiB", update="next_forward")
    train(engine, [batch])
    weight, (unit,) = engine.module.layers[0].weight, engine.units
    weight.data = torch.zeros(96, 96)
    assert unit.update is not None and not unit.update.done.done()
    set_when_awaited(waited_for, unit, monkeypatch)
    try:
        assert engine.module(batch[0], torch.zeros(4, 96)).item() == 0.0
    finally:
        waited_for.set()


def test_a_step_after_backward_ends_once_the_update_is_written(
    make_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for the write, instead of a later use of the unit."""
    waited_for = hold_updates(monkeypatch)
    batch, *_ = vector_batches(1, width=96)
    engine = make_engine(seeded(lambda: Linears(96, depth=1)), unit_size="64MiB", update="after_backward")
    (unit,) = engine.units
    set_when_awaited(waited_for, unit, monkeypatch)
    try:
        train(engine, [batch])
        assert unit.update is not None and unit.update.done.done()
    finally:
        waited_for.set()
