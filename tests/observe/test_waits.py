"""Counters of waits: after interrupts, and of engines that get one device after the other."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.observe.ledger import Waited, Waits, between
from infinity.observe.recorder import Recorder
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.loops import open_engine
from support.models import Linears, seeded, vector_batches


class Interrupted(Waits):
    """Its first wait is interrupted as it begins."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = True

    def begin(self) -> Any:
        if self._is_first:
            self._is_first = False
            raise KeyboardInterrupt
        return super().begin()


def test_waits_count_after_one_that_was_interrupted_as_it_began() -> None:
    recorder = Recorder(waits=Interrupted())
    with pytest.raises(KeyboardInterrupt), recorder.wait("gather", "parameters"):
        raise AssertionError("the block of a wait that did not begin")
    assert not recorder.is_waiting
    with recorder.wait("gather", "edits"), recorder.wait("gather", "parameters"):
        assert recorder.is_waiting
    assert {reason: one.count for reason, one in recorder.waits.so_far().items()} == {"edits": 1}


def test_an_engine_does_not_count_the_waits_of_the_one_that_had_its_device_before() -> None:
    device = CpuDevice()
    for _ in range(2):
        with open_engine(seeded(Linears), engine_config("cpu", "cpu"), device) as engine:
            assert engine.ledger.waits() == {} and engine.ledger.snapshot().wait_seconds == 0
            for batch in vector_batches(2):
                engine.backward(engine(*batch))
                engine.step()
            assert engine.ledger.waits() and engine.ledger.snapshot().wait_seconds > 0


def test_reasons_without_a_wait_between_two_readings_are_left_out() -> None:
    before = {"edits": Waited(2, 1.0, 0.5), "norm": Waited(1, 1.0, 1.0)}
    after = {"edits": Waited(3, 1.5, 0.75), "norm": Waited(1, 1.0, 1.0), "loss": Waited(1, 0.25, 0.0)}
    assert between(before, after) == {"edits": Waited(1, 0.5, 0.25), "loss": Waited(1, 0.25, 0.0)}
