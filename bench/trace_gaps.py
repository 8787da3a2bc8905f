"""Gaps between kernels, and Python that ran meanwhile: pure analysis of a trace and of samples.

A gap is a part of a step in which no kernel runs. Times are microseconds of the trace, results milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from frame_sampler import Frame, Sample, between
from infinity.observe.timeline import Interval, seconds, union, within, without
from kineto import Clock, Span, Trace, direction, short

LATENCY = 10.0
"""µs from the launch of a kernel to its start on an idle device, at most."""
REACH = 1000.0
"""µs by which a sample may precede a gap that has none of its own."""
FLOOR = 10.0
"""µs; shorter gaps are one line of the sums."""


@dataclass(frozen=True)
class Gap:
    """A part of a step without a kernel. before, after: the kernels around it; None at the ends of the trace or step.

    launch: the call that launched `after`.
    """

    step: int
    start: float
    end: float
    before: Span | None
    after: Span | None
    launch: Span | None

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def ended(self) -> str:
        """Reason of its end: `late`: the host launched the next kernel in the gap; `queued`: it had been launched
        before, and waited on the device for other work; `end`: the step ended; empty: unknown.
        """
        if self.after is None:
            return "end"
        if self.launch is None:
            return ""
        return "late" if self.launch.start >= self.start - LATENCY else "queued"


def top_level(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that are in no other one. spans: in the order of their starts, the longest first."""
    found: list[Span] = []
    for span in spans:
        if not found or span.start >= found[-1].end:
            found.append(span)
    return found


def busy_spans(trace: Trace, thread: str) -> list[Span]:
    """Return kernels; without any, the top-level operators of the host's `thread`, and a note."""
    if trace.kernels:
        return trace.kernels
    trace.notes.append("no kernels in the trace: operators of the main thread stand for them")
    return top_level(span for span in trace.operators if not thread or span.thread == thread)


# -- shares ------------------------------------------------------------------------------------------------------------


def shares(busy: Sequence[Span], copies: Sequence[Span], windows: Sequence[Interval]) -> dict[str, float]:
    """Return the shares of all windows in which kernels, copies of each direction, copies alone and nothing ran."""
    total = seconds(windows) or 1.0

    def share(intervals: Sequence[Interval]) -> float:
        return sum(seconds(within(intervals, *window)) for window in windows) / total

    kernels, copying = _set(busy), _set(copies)
    found = {"milliseconds": seconds(windows) / 1e3, "kernels": share(kernels)}
    for way in ("to device", "from device", "on device"):
        found[way] = share(_set(copy for copy in copies if direction(copy) == way))
    found["copies alone"] = share(without(copying, kernels))
    found["nothing"] = 1.0 - share(union([*kernels, *copying]))
    return found


def _set(spans: Iterable[Span]) -> list[Interval]:
    return union((span.start, span.end) for span in spans)


def most(spans: Iterable[Span], windows: Sequence[Interval], count: int) -> list[dict[str, Any]]:
    """Return the names with most time in the windows, with bytes for copies."""
    total: dict[str, list[float]] = {}
    for span in spans:
        inside = sum(max(0.0, min(span.end, high) - max(span.start, low)) for low, high in windows)
        if inside > 0:
            sums = total.setdefault(span.name, [0, 0.0, 0])
            for k, value in enumerate((1, inside / 1e3, span.nbytes)):
                sums[k] += value
    rows = sorted(total.items(), key=lambda item: -item[1][1])[:count]
    return [{"name": name, "count": int(n), "ms": ms, "bytes": int(nbytes)} for name, (n, ms, nbytes) in rows]


# -- gaps --------------------------------------------------------------------------------------------------------------


def gaps(busy: Sequence[Span], launches: dict[int, Span], windows: Sequence[Interval]) -> list[Gap]:
    """Return all gaps in the order of time. busy: in the order of starts. windows: one for each step."""
    running = _set(busy)
    starts = [span.start for span in busy]
    by_end = sorted(busy, key=lambda span: span.end)
    ends = [span.end for span in by_end]
    found = []
    for step, window in enumerate(windows):
        for start, end in without([window], running):
            last, following = bisect_right(ends, start) - 1, bisect_left(starts, end)
            before = by_end[last] if last >= 0 else None
            after = busy[following] if end < window[1] and following < len(busy) else None
            launch = launches.get(after.correlation) if after and after.correlation is not None else None
            found.append(Gap(step, start, end, before, after, launch))
    return found


class Meanwhile:
    """Samples, copies and calls of a trace by time."""

    def __init__(self, trace: Trace, samples: Sequence[Sample], clock: Clock | None) -> None:
        self.samples = list(samples) if clock is not None else []
        self._times = [clock.at(sample.ns) for sample in self.samples] if clock is not None else []
        self._copies = {way: _set(span for span in trace.copies if direction(span) == way)
                        for way in dict.fromkeys(map(direction, trace.copies))}  # fmt: skip
        self._calls = trace.calls

    def samples_of(self, gap: Gap) -> list[Sample]:
        return between(self.samples, self._times, gap.start, gap.end, REACH)

    def copies(self, gap: Gap) -> dict[str, float]:
        """Return milliseconds of copies in the gap by direction."""
        found = {way: seconds(within(spans, gap.start, gap.end)) / 1e3 for way, spans in self._copies.items()}
        return {way: ms for way, ms in found.items() if ms > 0}

    def calls(self, gap: Gap, count: int = 3) -> dict[str, float]:
        """Return milliseconds of the host's longest calls of the runtime in the gap by name and thread."""
        found: Counter[str] = Counter()
        for call in self._calls:
            if call.start >= gap.end:
                break
            if call.end > gap.start:
                found[f"{call.name} [{call.thread}]"] += (min(call.end, gap.end) - max(call.start, gap.start)) / 1e3  # type: ignore[assignment]
        return dict(found.most_common(count))


def described(gap: Gap, window: Interval, meanwhile: Meanwhile) -> dict[str, Any]:
    """Return the description of a gap for JSON. start_ms: from the start of the step."""
    return {
        "step": gap.step,
        "start_ms": (gap.start - window[0]) / 1e3,
        "ms": gap.length / 1e3,
        "ended": gap.ended,
        "launched_ms_before": (gap.end - gap.launch.start) / 1e3 if gap.launch else None,
        "before": short(gap.before.name) if gap.before else "start of the trace",
        "after": short(gap.after.name) if gap.after else "end of the step",
        "streams": [span.thread if span else "" for span in (gap.before, gap.after)],
        "copies": meanwhile.copies(gap),
        "calls": meanwhile.calls(gap),
        "threads": threads(meanwhile.samples_of(gap)),
    }


# -- Python ------------------------------------------------------------------------------------------------------------


def is_models(thread: str) -> bool:
    """Return whether forward or backward runs in a thread of that name."""
    return thread == "main" or thread.startswith("autograd")


def threads(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return the most frequent stack of each thread that matters, and in how many of the samples it was.

    The innermost frame comes first if it is of another package, then the innermost ones of ours.
    """
    stacks: dict[str, Counter[tuple[Frame, ...]]] = {}
    for sample in samples:
        for thread, stack in sample.stacks.items():
            if stack and (is_models(thread) or thread.startswith("infinity-")):
                stacks.setdefault(thread, Counter())[stack] += 1
    found = {}
    for thread in sorted(stacks, key=lambda name: (not name.startswith("autograd"), name != "main", name)):
        ((stack, count),) = stacks[thread].most_common(1)
        found[thread] = {"frames": [str(frame) for frame in stack], "in": count, "of": len(samples)}
    return found


def site(sample: Sample) -> tuple[str, ...]:
    """Return the innermost frame of the package in the model's threads, then its callers in the package.

    An autograd thread that runs Python decides; then the main thread, which waits for autograd in a backward.
    """
    names = [name for name, stack in sample.stacks.items() if stack and is_models(name)]
    if not names:
        return ("no Python",)
    stack = sample.stacks[min(names, key=lambda name: name == "main")]
    ours = [str(frame) for frame in stack if frame.is_ours and frame.file.startswith("infinity/")]
    return tuple(ours) or (str(stack[0]),)


def by_site(found: Sequence[Gap], meanwhile: Meanwhile, floor: float = FLOOR) -> list[dict[str, Any]]:
    """Return the sums of gaps by site and reason of their ends, the largest first.

    A gap with samples at several sites is divided among them. count: gaps with a sample there. median_ms: of these.
    callers: the most frequent ones.
    """
    parts: dict[tuple[str, str], list[tuple[float, float]]] = {}
    callers: dict[str, Counter[tuple[str, ...]]] = {}
    for gap in found:
        if gap.length < floor:
            parts.setdefault((f"gaps below {floor / 1e3:g} ms", ""), []).append((gap.length, gap.length))
            continue
        chains = [site(sample) for sample in meanwhile.samples_of(gap)] or [("no sample",)]
        for name, *rest in chains:
            callers.setdefault(name, Counter())[tuple(rest)] += 1
        for name, count in Counter(chain[0] for chain in chains).items():
            parts.setdefault((name, gap.ended), []).append((gap.length * count / len(chains), gap.length))
    rows = [
        {
            "site": name,
            "callers": list(callers[name].most_common(1)[0][0]) if name in callers else [],
            "ended": ended,
            "seconds": sum(share for share, _ in gaps_here) / 1e6,
            "count": len(gaps_here),
            "median_ms": median(length for _, length in gaps_here) / 1e3,
        }
        for (name, ended), gaps_here in parts.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def host_sites(samples: Sequence[Sample], count: int = 20) -> list[dict[str, Any]]:
    """Return the shares of all samples by site, in gaps or not."""
    found = Counter(site(sample)[0] for sample in samples)
    return [{"site": name, "share": n / len(samples)} for name, n in found.most_common(count)]
