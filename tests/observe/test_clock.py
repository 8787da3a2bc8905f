"""The clock of a step: which spans count, whatever their length."""

from __future__ import annotations

import pytest
import torch

from infinity.observe.clock import Phase, StepClock
from support.streams import Host, Stream


def test_a_backward_inside_a_forward_counts_as_forward() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.begin(Phase.FORWARD)
    clock.begin(Phase.BACKWARD)
    clock.end(Phase.BACKWARD)
    clock.end(Phase.FORWARD)
    seconds = clock.read()
    assert seconds[Phase.FORWARD] > 0 and seconds[Phase.BACKWARD] == seconds[Phase.STEP] == 0
    assert set(clock.read().values()) == {0.0}


def test_a_phase_without_an_end_does_not_count() -> None:
    """A backward that raised is dropped when the next forward begins; a phase that ends twice ends once."""
    clock = StepClock(torch.device("cpu"))
    clock.begin(Phase.BACKWARD)
    clock.begin(Phase.FORWARD)
    clock.end(Phase.BACKWARD)
    clock.end(Phase.FORWARD)
    once = clock.read()
    assert once[Phase.BACKWARD] == 0 and once[Phase.FORWARD] > 0
    clock.end(Phase.FORWARD)
    assert clock.read()[Phase.FORWARD] == 0


def test_phases_on_cuda_last_as_long_as_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host issues all work at once, and waits for it in `read`."""
    host = Host()
    stream = Stream(host)
    monkeypatch.setattr(torch.cuda, "Event", host.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    clock = StepClock(torch.device("cuda"))
    for phase, seconds in ((Phase.FORWARD, 1.0), (Phase.BACKWARD, 2.0), (Phase.FORWARD, 4.0)):
        clock.begin(phase)
        stream.work(seconds)
        clock.end(phase)
    assert host.now == 0
    assert clock.read() == {Phase.FORWARD: 5.0, Phase.BACKWARD: 2.0, Phase.STEP: 0.0}
