"""All that a recorder has seen, and the timeline that follows from it.

Times are stamps: seconds on the clock of `infinity.concurrency.now`, or a function that returns them once a stream of
the device has come that far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

from infinity.observe.timeline import LANES, Interval, Sample, Span, StepSpan, seconds, union, within, without

Stamp: TypeAlias = "float | Callable[[], float | None]"
"""Seconds, or a function that returns them; None: not reached yet."""


class Timed(Protocol):
    """Work with the times of its submission and its end; None: not ended yet."""

    @property
    def times(self) -> tuple[float, float | None]: ...


MODEL = "model"
"""Name of all threads that are not the engine's."""

_FED_BY = {
    "gather": ("host_to_device", "nvme_read", "update", "reduce", "device_to_host", "nvme_write"),
    "reduce": ("device_to_host", "nvme_read", "nvme_write"),
    "update": ("gather", "host_to_device", "device_to_host", "reduce", "nvme_read", "nvme_write"),
    "activations": ("host_to_device", "device_to_host"),
}
"""Lane that the model waits for → lanes that the work there may wait for in turn, the likeliest first."""


class Stamped(NamedTuple):
    """Work of a lane."""

    lane: str
    name: str
    nbytes: int
    thread: str
    start: Stamp
    end: Stamp


class Request(NamedTuple):
    """Work that another thread does. queue: requests that are served in turn."""

    queue: str
    lane: str
    name: str
    nbytes: int
    thread: str
    work: Timed


class Wait(NamedTuple):
    """The model waits for work of a lane."""

    lane: str
    start: Stamp
    end: Stamp


class Mark(NamedTuple):
    """The model's compute has this name from then on. Empty: it does not compute."""

    name: str
    at: Stamp


class Timeline(NamedTuple):
    """Work of all lanes, steps, and bytes in tiers."""

    work: Sequence[Span]
    steps: Sequence[StepSpan]
    samples: Sequence[Sample]


@dataclass(eq=False)
class Recording:
    """All that happened from `began` on. Threads append to its lists."""

    began: Stamp
    on_host: bool
    """True if the model computes in its own thread, which cannot compute while it does other work."""
    limit: int | None = None
    """Number of steps after which it ends; None: unlimited."""
    work: list[Stamped] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    boundaries: list[Stamp] = field(default_factory=list)
    """Ends of steps."""

    def timeline(self, until: float) -> Timeline:
        """Return the timeline up to now, which is `until`. Work that has not ended by then is cut off, as is a step."""

        def read(stamp: Stamp) -> float:
            time = stamp() if callable(stamp) else stamp
            return until if time is None else min(time, until)

        ends = [read(end) for end in self.boundaries]
        last = ends[-1] if ends else read(self.began)
        is_within = not ends or any(mark.name and read(mark.at) > last for mark in list(self.marks))
        work = [
            Span(each.lane, each.name, each.nbytes, each.thread, read(each.start), read(each.end))
            for each in list(self.work)
        ]
        own = [span for span in work if self.on_host and span.thread == MODEL]
        work += self._served(until)
        waits = [(each.lane, read(each.start), read(each.end)) for each in list(self.waits)]
        elsewhere = union([*((span.start, span.end) for span in own), *(wait[1:] for wait in waits)])
        work += self._computed(read, elsewhere, until)
        work.sort(key=lambda span: span.start)
        exposure = _Exposure(work, own, waits)
        steps = [StepSpan(start, end, exposure.of(start, end)) for start, end in pairwise([read(self.began), *ends])]
        if is_within:
            steps.append(StepSpan(last, until, exposure.of(last, until), is_complete=False))
        return Timeline(work, steps, list(self.samples))

    def _served(self, until: float) -> Iterator[Span]:
        """Yield the requests. A queue serves one at a time, in the order in which they ended."""
        queues: dict[str, list[tuple[float, float, Request]]] = defaultdict(list)
        for request in list(self.requests):
            start, end = request.work.times
            queues[request.queue].append((until if end is None else min(end, until), start, request))
        for queue in queues.values():
            free = 0.0
            for end, start, request in sorted(queue, key=lambda each: each[:2]):
                start, free = min(max(start, free), end), end
                yield Span(request.lane, request.name, request.nbytes, request.thread, start, end)

    def _computed(self, read: Callable[[Stamp], float], elsewhere: Sequence[Interval], until: float) -> Iterator[Span]:
        """Yield the model's compute: the time between marks, without waits and work of its thread in other lanes."""
        marks = [(mark.name, read(mark.at)) for mark in list(self.marks)]
        for (name, start), (_, end) in pairwise([*marks, ("", until)]):
            if name and end > start:
                for low, high in without([(start, end)], elsewhere):
                    yield Span("compute", name, 0, MODEL, low, high)


class _Exposure:
    """Attributes the time in which the model did not compute."""

    def __init__(self, work: Sequence[Span], own: Sequence[Span], waits: Sequence[tuple[str, float, float]]) -> None:
        """own: work of the model's thread itself."""
        self._lanes = {lane: union((span.start, span.end) for span in work if span.lane == lane) for lane in LANES}
        self._own = {lane: union((span.start, span.end) for span in own if span.lane == lane) for lane in LANES}
        in_own = union((span.start, span.end) for span in own)
        self._waits: dict[str, list[Interval]] = {}
        """Lane → seconds in which the model waited for it and did no other work."""
        for lane in {lane for lane, *_ in waits}:
            waited = union((start, end) for waited_for, start, end in waits if waited_for == lane)
            self._waits[lane] = without(waited, in_own)

    def of(self, start: float, end: float) -> dict[str, float]:
        """Return lane → seconds from `start` to `end` in which the model waited for it, or its thread worked in it.

        A moment of a wait belongs to the lane that is waited for if that works then; else to the first lane that may
        hold it up (`_FED_BY`) and works then. Time in which none works is the host's, and counts as compute.
        """
        total: dict[str, float] = defaultdict(float)
        for lane, own in self._own.items():
            total[lane] += seconds(within(own, start, end))
        for lane, waits in self._waits.items():
            left = within(waits, start, end)
            for cause in (lane, *_FED_BY.get(lane, ())):
                rest = without(left, self._lanes[cause])
                total[cause] += seconds(left) - seconds(rest)
                left = rest
        return {lane: total[lane] for lane in LANES if total[lane] > 0}
