"""Time for which compute on a device stood still until a transfer had ended, by events on its streams."""

from __future__ import annotations

from collections import deque

import torch

_MOST = 64
"""Number of unread waits above which those that have ended are read."""


class Stalls:
    """Measures the waits of compute streams. Any thread may use it, one at a time."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: deque[tuple[torch.Event, torch.Event]] = deque()
        """Events before and after each wait, oldest first."""

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make `stream` wait for `event`, and measure for how long."""
        if event.query():  # nothing to measure
            stream.wait_event(event)
            return
        before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._open.append((before, after))
        if len(self._open) > _MOST:
            self._read()

    def seconds(self) -> float:
        """Return the seconds of all waits that have ended."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._seconds += before.elapsed_time(after) / 1000
