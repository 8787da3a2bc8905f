"""Times of a device's streams, by events: stalls until a transfer had ended, and points on the host's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from infinity.concurrency import now
from infinity.observe.recording import Stamp

_MOST = 64
"""Number of unread waits above which those that have ended are read."""


class Stalls:
    """Measures the waits of compute streams. Any thread may use it, one at a time."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: deque[tuple[torch.Event, torch.Event]] = deque()
        """Events before and after each wait, oldest first."""

    def wait(self, stream: torch.Stream, event: torch.Event) -> tuple[torch.Event, torch.Event] | None:
        """Make `stream` wait for `event`. Returns the events that measure for how long; None if it has ended."""
        if event.query():
            return None
        before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._open.append((before, after))
        if len(self._open) > _MOST:
            self._read()
        return before, after

    def seconds(self) -> float:
        """Return the seconds of all waits that have ended."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._seconds += before.elapsed_time(after) / 1000


class EventClock:
    """Places events of streams on the host's clock."""

    def __init__(self) -> None:
        self._base: tuple[torch.Event, float] | None = None
        """An event and its seconds on the host's clock."""

    def calibrate(self, stream: torch.Stream) -> None:
        """Compare the clocks. Waits for `stream`."""
        event = torch.Event(stream.device, enable_timing=True)
        event.record(stream)
        event.synchronize()
        self._base = event, now()

    def stamp(self, stream: torch.Stream) -> Stamp:
        """Return the time at which the work issued to `stream` so far ends."""
        event = torch.Event(stream.device, enable_timing=True)
        event.record(stream)
        return self.seconds_of(event)

    def seconds_of(self, event: torch.Event) -> Callable[[], float | None]:
        assert self._base is not None, "calibrate was not called"
        return partial(_seconds_of, *self._base, event)


def _seconds_of(base: torch.Event, seconds: float, event: torch.Event) -> float | None:
    """Return the host's time of `event`; None if the stream has not reached it."""
    return seconds + base.elapsed_time(event) / 1000 if event.query() else None
