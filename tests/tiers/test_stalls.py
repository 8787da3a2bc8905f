"""Waits of a model on a device and times of its events, by streams in virtual time."""

from __future__ import annotations

import pytest
import torch

from infinity.observe.ledger import Waited
from infinity.tiers import stalls
from infinity.tiers.stalls import EventClock, StreamWaits
from support.streams import Host, Stream


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(torch, "Event", made.event)
    monkeypatch.setattr(stalls, "now", lambda: made.now)
    return made


@pytest.fixture
def compute(host: Host, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The model's stream."""
    made = Stream(host)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made)
    return made


@pytest.fixture
def waits() -> StreamWaits:
    return StreamWaits(torch.device("cpu"), EventClock())


def test_a_copy_that_compute_waits_for_is_time_without_work(host: Host, compute: Stream, waits: StreamWaits) -> None:
    """The thread does not sleep: its stream waits."""
    copies, event = Stream(host), host.event()
    copies.work(5.0)
    compute.work(2.0)
    event.record(copies)
    began = waits.begin()
    compute.wait_event(event)
    waits.end(began, "parameters")
    assert waits.so_far() == {"parameters": Waited(1, 0.0, 0.0)}, "the device has not come so far"
    host.now = 5.0
    assert waits.so_far() == {"parameters": Waited(1, 0.0, 3.0)}


@pytest.mark.parametrize(("work", "idle"), [(0.0, 4.0), (3.0, 1.0), (9.0, 0.0)])
def test_a_sleep_costs_the_time_in_which_the_stream_has_no_work(
    host: Host, compute: Stream, waits: StreamWaits, work: float, idle: float
) -> None:
    """The thread sleeps for 4 seconds after it has issued work."""
    compute.work(work)
    began = waits.begin()
    host.now = 4.0
    waits.end(began, "edits")
    host.now = 20.0
    assert waits.so_far() == {"edits": Waited(1, 4.0, idle)}


def test_many_waits_are_added_by_reason(host: Host, compute: Stream, waits: StreamWaits) -> None:
    for number in range(200):
        began = waits.begin()
        host.now += 0.5
        waits.end(began, "norm" if number % 4 else "loss")
    assert waits.so_far() == {"norm": Waited(150, 75.0, 75.0), "loss": Waited(50, 25.0, 25.0)}
    assert not waits._open


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
