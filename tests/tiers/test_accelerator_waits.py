"""Waits of host threads for a CUDA device: they block, and use streams and events of one kind."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.tiers import accelerator
from infinity.tiers.accelerator import StreamTransfer

GPU = torch.device("cuda", 0)


class Generic:
    """`torch.Event`, which does not block a waiting thread on CUDA."""

    happened = False

    def __init__(self, calls: list[Any], device: torch.device) -> None:
        assert device == GPU
        self._calls = calls

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return self.happened

    def wait(self, stream: object) -> None:
        self._calls.append(("follows", stream))

    def synchronize(self) -> None:
        self._calls.append("spins")


class Blocking:
    """`torch.cuda.Event`, which takes streams of torch.cuda only."""

    def __init__(self, calls: list[Any], *, blocking: bool) -> None:
        assert blocking
        self._calls = calls

    def record(self, stream: object) -> None:
        self._calls.append(("recorded", stream))

    def synchronize(self) -> None:
        self._calls.append("sleeps")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def stream(device: torch.device, priority: int) -> str:
        assert device == GPU and priority < 0
        made.append("stream")
        return f"stream of {threading.current_thread().name}"

    monkeypatch.setattr(torch, "Event", lambda device: Generic(made, device))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Blocking(made, blocking=blocking))
    monkeypatch.setattr(accelerator, "_waits", accelerator._Waits())
    return made


def test_a_thread_sleeps_until_a_cuda_event(calls: list[Any]) -> None:
    transfer = StreamTransfer(SimpleNamespace(device=GPU))  # type: ignore[arg-type]
    own = f"stream of {threading.current_thread().name}"
    for _ in range(2):
        transfer.wait()
    slept = [("follows", own), ("recorded", own), "sleeps"]
    assert calls == ["stream", *slept, *slept]
    calls.clear()
    other = threading.Thread(target=transfer.wait, name="other")
    other.start()
    other.join()
    assert calls == ["stream", ("follows", "stream of other"), ("recorded", "stream of other"), "sleeps"]


def test_a_cuda_event_that_has_happened_needs_no_sleep(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generic, "happened", True)
    StreamTransfer(SimpleNamespace(device=GPU)).wait()  # type: ignore[arg-type]
    assert "sleeps" not in calls


def test_a_thread_polls_before_it_sleeps(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep costs an event, a stream and an interrupt."""
    times = iter(range(1000))
    monkeypatch.setattr(accelerator, "now", lambda: next(times) * accelerator._POLLED / 10)
    transfer = StreamTransfer(SimpleNamespace(device=GPU))  # type: ignore[arg-type]
    event: Any = transfer.event
    monkeypatch.setattr(event, "query", lambda: next(times) > 7)
    transfer.wait()
    assert calls == []
    monkeypatch.setattr(event, "query", lambda: False)
    transfer.wait()
    assert calls[-1] == "sleeps"
