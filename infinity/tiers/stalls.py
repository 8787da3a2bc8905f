"""Times of a device's streams, by events: waits of the model, and points on the host's clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from infinity.concurrency import now
from infinity.observe.ledger import Waits
from infinity.observe.recording import Stamp

_MOST = 64
"""Number of unread waits above which those that have ended are read."""


class _Wait(NamedTuple):
    """Events on the model's stream before and after a wait."""

    reason: str
    before: torch.Event
    after: torch.Event


class StreamWaits(Waits):
    """Waits of threads that compute on streams of a device [Note: two times of a wait].

    The stream reaches the first event of a wait when it has no work left. It reaches the second one when the thread has
    woken and the copies that it waits for have ended. The time between them is that for which compute stood still. It
    is about 0 if the device still had work when the thread woke.
    """

    def __init__(self, device: torch.device, clock: EventClock) -> None:
        super().__init__()
        self._device = device
        self._clock = clock
        self._stood: defaultdict[str, float] = defaultdict(float)
        self._open: deque[_Wait] = deque()
        """Waits whose events were not read, oldest first."""

    def begin(self) -> tuple[float, torch.Event]:
        return now(), _event(torch.accelerator.current_stream(self._device))

    def end(self, began: Any, reason: str) -> _Wait:
        slept_from, before = began
        wait = _Wait(reason, before, _event(torch.accelerator.current_stream(self._device)))
        self._count(reason, now() - slept_from)
        self._open.append(wait)
        # Bounds the number of live events.
        if len(self._open) > _MOST:
            self._read()
        return wait

    def stamps(self, wait: _Wait) -> tuple[Stamp, Stamp]:
        return self._clock.seconds_of(wait.before), self._clock.seconds_of(wait.after)

    def _stood_still(self) -> Mapping[str, float]:
        """Return reason → seconds of all waits that the device has passed."""
        self._read()
        with self._access:
            return dict(self._stood)

    def _read(self) -> None:
        with self._access:
            while self._open and self._open[0].after.query():
                wait = self._open.popleft()
                self._stood[wait.reason] += wait.before.elapsed_time(wait.after) / 1000


class EventClock:
    """Places events of streams on the host's clock."""

    def __init__(self) -> None:
        self._base: tuple[torch.Event, float] | None = None
        """An event and its seconds on the host's clock."""

    def calibrate(self, stream: torch.Stream) -> None:
        """Compare the clocks. Waits for `stream`."""
        event = _event(stream)
        event.synchronize()
        self._base = event, now()

    def stamp(self, stream: torch.Stream) -> Stamp:
        """Return the time at which the work issued to `stream` so far ends."""
        return self.seconds_of(_event(stream))

    def seconds_of(self, event: torch.Event) -> Callable[[], float | None]:
        assert self._base is not None, "calibrate was not called"
        return partial(_seconds_of, *self._base, event)


def _event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def _seconds_of(base: torch.Event, seconds: float, event: torch.Event) -> float | None:
    """Return the host's time of `event`; None if the stream has not reached it."""
    return seconds + base.elapsed_time(event) / 1000 if event.query() else None
