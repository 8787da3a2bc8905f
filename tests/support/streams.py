"""Streams and events of a device in virtual time, in place of torch's. Nothing runs."""

from __future__ import annotations

from typing import Any


class Host:
    """The host's clock. `now`: its seconds."""

    now = 0.0

    def event(self, device: object = None, **options: Any) -> Event:
        """Takes the arguments of torch.Event."""
        return Event(self)


class Stream:
    """A stream, whose work takes the seconds that are given."""

    device = "device"

    def __init__(self, host: Host) -> None:
        self._host = host
        self.end = 0.0
        """When the work that was issued so far ends."""

    def work(self, seconds: float) -> None:
        self.end = max(self.end, self._host.now) + seconds

    def wait_event(self, event: Event) -> None:
        self.end = max(self.end, event.end)


class Event:
    """An event with a time. An event that was not recorded has ended, as torch's, and has no time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._end: float | None = None

    @property
    def end(self) -> float:
        return 0.0 if self._end is None else self._end

    def record(self, stream: Stream) -> None:
        stream.work(0.0)
        self._end = stream.end

    def query(self) -> bool:
        return self.end <= self._host.now

    def synchronize(self) -> None:
        self._host.now = max(self._host.now, self.end)

    def elapsed_time(self, last: Event) -> float:
        """Return milliseconds. Both have been recorded and have ended, as torch requires."""
        for each in (self, last):
            if each._end is None or not each.query():
                raise RuntimeError("the event was not recorded or has not ended")
        return 1000 * (last.end - self.end)
