"""Stalls of a stream and times of its events, by streams in virtual time."""

from __future__ import annotations

import pytest
import torch

from infinity.tiers import stalls
from infinity.tiers.stalls import EventClock, Stalls
from support.streams import Host, Stream


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(torch, "Event", made.event)
    monkeypatch.setattr(stalls, "now", lambda: made.now)
    return made


def test_a_stream_waits_for_an_event_and_the_stall_is_measured(host: Host) -> None:
    copies, compute = Stream(host), Stream(host)
    copies.work(5.0)
    compute.work(2.0)
    event = host.event()
    event.record(copies)
    found = Stalls()
    assert found.wait(compute, event) is not None  # type: ignore[arg-type]
    assert compute.end == 5.0 and found.seconds() == 0.0
    host.now = 5.0
    assert found.seconds() == 3.0
    assert found.wait(compute, event) is None  # type: ignore[arg-type]
    assert found.seconds() == 3.0


def test_times_of_a_stream_are_on_the_clock_of_the_host(host: Host) -> None:
    """The stream is ahead of the host by 5 seconds when the clocks are compared, and by 3 seconds at the stamp."""
    stream = Stream(host)
    stream.work(5.0)
    clock = EventClock()
    clock.calibrate(stream)  # type: ignore[arg-type]
    stream.work(3.0)
    stamp = clock.stamp(stream)  # type: ignore[arg-type]
    assert callable(stamp) and stamp() is None
    host.now = 20.0
    assert stamp() == 8.0
