"""Events of the JSON that torch.profiler exports (Kineto): kernels, copies, calls that launch them, marks, the clock.

Times are microseconds of the trace. The meaning of its zero varies, so `fit` finds the host's clock in it by marks.
Events with missing or broken fields are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BROKEN = 1000.0
"""µs that a kernel may start before its launch. More is a record with a wrong time, as CUPTI of CUDA 12.6 to 13.0
returns for the first kernels of a session (pytorch/pytorch issue 192021)."""


@dataclass(frozen=True)
class Span:
    """An event with a duration. thread: the stream of a device's event. correlation: links a kernel with its launch."""

    name: str
    start: float
    end: float
    thread: str = ""
    correlation: int | None = None
    nbytes: int = 0


@dataclass
class Trace:
    """Events by category, in the order of their starts. overheads: time that the profiler itself took."""

    kernels: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    operators: list[Span] = field(default_factory=list)
    overheads: list[Span] = field(default_factory=list)
    annotations: dict[str, Span] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def launches(self) -> dict[int, Span]:
        """Call of the runtime by the correlation of what it launched."""
        return {call.correlation: call for call in self.calls if call.correlation is not None}


# -- the file ----------------------------------------------------------------------------------------------------------


def events_of(text: str) -> list[Any]:
    """Return the events. Those that are no JSON, such as names with quotation marks, are left out."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return _salvaged(text)
    events = found.get("traceEvents") if isinstance(found, dict) else found
    return events if isinstance(events, list) else []


def _salvaged(text: str) -> list[Any]:
    decoder, found = json.JSONDecoder(strict=False), []
    position = max(text.find('"traceEvents"'), 0)
    while (position := text.find("{", position)) != -1:
        try:
            event, position = decoder.raw_decode(text, position)
            found.append(event)
        except ValueError:
            position += 1
    return found


def parse(events: Iterable[Any]) -> Trace:
    """Sort events by category."""
    trace = Trace()
    lanes = {
        "kernel": trace.kernels,
        "gpu_memset": trace.kernels,
        "gpu_memcpy": trace.copies,
        "cpu_op": trace.operators,
        "overhead": trace.overheads,
    }
    for event in events:
        span = _span(event)
        if span is None:
            continue
        category = str(event.get("cat", "")).lower()
        if category == "user_annotation":
            trace.annotations.setdefault(span.name, span)
        elif category.endswith(("_runtime", "_driver")):  # cuda_runtime, cuda_driver, xpu_runtime
            trace.calls.append(span)
        elif category in lanes:
            lanes[category].append(span)
    for lane in (trace.kernels, trace.copies, trace.calls, trace.operators, trace.overheads):
        lane.sort(key=lambda each: (each.start, -each.end))
    return trace


def _span(event: Any) -> Span | None:
    if not isinstance(event, Mapping) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return None
    start, duration = _number(event.get("ts")), _number(event.get("dur"))
    if start is None or duration is None or start <= 0 or duration < 0:
        return None
    given = event.get("args")
    args = given if isinstance(given, Mapping) else {}
    correlation, nbytes = _number(args.get("correlation")), _number(args.get("bytes"))
    return Span(
        event["name"],
        start,
        start + duration,
        str(args.get("stream", event.get("tid", ""))),
        int(correlation) if correlation is not None else None,
        int(nbytes or 0),
    )


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def checked(trace: Trace) -> Trace:
    """Leave out device events whose times cannot be right, and shift all if kernels start before their launches.

    Adds a note for each correction.
    """
    launches = trace.launches

    def lead(span: Span) -> float | None:
        launch = launches.get(span.correlation) if span.correlation is not None else None
        return span.start - launch.start if launch is not None else None

    leads = sorted(found for found in map(lead, trace.kernels) if found is not None)
    shift = max(0.0, -leads[len(leads) // 20]) if leads else 0.0
    if shift:
        trace.notes.append(f"kernels began {shift:.0f} µs before their launches: times of the device are shifted by it")
    for name in ("kernels", "copies"):
        before: list[Span] = getattr(trace, name)
        kept = [span for span in before if (found := lead(span)) is None or found + shift >= -BROKEN]
        if len(kept) < len(before):
            trace.notes.append(f"{len(before) - len(kept)} {name} with impossible times are left out")
        setattr(trace, name, [replace(span, start=span.start + shift, end=span.end + shift) for span in kept])
    return trace


def unseen(trace: Trace, start: float, end: float) -> tuple[int, int]:
    """Return how many launches of kernels between two times have no kernel in the trace, and how many there are."""
    seen = {span.correlation for span in trace.kernels}
    made = [call for call in trace.calls if "LaunchKernel" in call.name and start <= call.start < end]
    return sum(call.correlation not in seen for call in made), len(made)


# -- the clock ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """An annotation that began between two readings of the host's clock, in ns.

    group: marks made in one go; the one with the closest readings counts.
    """

    group: str
    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Clock:
    """Line from the host's clock to the trace's. drift: µs between the first and the last mark. error: µs, at most."""

    host: float
    trace: float
    slope: float
    drift: float
    error: float

    def at(self, host_ns: float) -> float:
        """Return the trace's time."""
        return self.trace + (host_ns / 1e3 - self.host) * self.slope


def fit(marks: Sequence[Mark], annotations: Mapping[str, Span]) -> Clock | None:
    """Return the line through the marks that the trace holds; None if it has none."""
    best: dict[str, Mark] = {}
    for mark in sorted(marks, key=lambda each: each.after - each.before):
        if mark.name in annotations:
            best.setdefault(mark.group, mark)
    if not best:
        return None
    points = sorted(((mark.before + mark.after) / 2e3, annotations[mark.name].start) for mark in best.values())
    (host, trace), (last_host, last_trace) = points[0], points[-1]
    drift = (last_trace - trace) - (last_host - host)
    slope = (last_trace - trace) / (last_host - host) if last_host > host else 1.0
    error = max((mark.after - mark.before) / 2e3 for mark in best.values())
    return Clock(host, trace, slope, drift, error)


# -- names -------------------------------------------------------------------------------------------------------------


def direction(copy: Span) -> str:
    """Return the direction of a copy: "to device", "from device" or "on device"."""
    return "to device" if "HtoD" in copy.name else "from device" if "DtoH" in copy.name else "on device"


def short(name: str, limit: int = 60) -> str:
    """Return a kernel's name without namespaces, template and arguments, except for its functor or product."""
    plain = re.sub(r"\(anonymous namespace\)|\{lambda[^}]*\}", "", name).removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0].strip().rpartition("::")[2] or plain
    functors = re.findall(r"\w*(?:Functor|Ops?|_cuda|_impl|gemm)\w*", plain[len(head) :])
    inner = next((each for each in functors if each not in head), "") if "<" in plain else ""
    shown = f"{head}<{inner}>" if inner else head
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
