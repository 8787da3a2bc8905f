"""Reads traces of `engine.profile` and `infinity plan --trace`. A file may come from anywhere, so all is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import UsageError
from infinity.inputs import parse_json, read_input
from infinity.observe.timeline import LANES, Sample, Span, StepSpan
from infinity.sizes import counted
from infinity.tier_kind import TierKind

_LARGEST_FILE = 1 << 30
_LARGEST_TIME = 1e15
"""Microseconds: 30 years."""
_LARGEST_COUNT = 1 << 63
_ROUNDING = 1e-6
"""Seconds."""


@dataclass
class Trace:
    """The work of one rank. Times are seconds from the start of the first step."""

    name: str = ""
    """Name of the process."""
    work: list[Span] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Each of one tier."""

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.end - step.start for step in self.steps)

    def describe(self) -> str:
        """Return the rank, and the number of steps and their mean seconds."""
        whole = [step.end - step.start for step in self.steps if step.is_complete]
        text = f"{counted(len(whole), 'step')}, {sum(whole) / len(whole):.3g} s each" if whole else "no whole step"
        if len(whole) < len(self.steps):
            text += ", and one that did not end"
        return f"{self.name}: {text}"

    def exposed(self, lane: str) -> float:
        """Seconds in which the model waited for `lane`."""
        return sum(step.exposed.get(lane, 0.0) for step in self.steps)


def read_trace(path: Path) -> Trace:
    """Read one trace. Raises UsageError with the first problem, and OSError."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file: pass a trace of engine.profile() or infinity plan --trace")
    if path.stat().st_size > _LARGEST_FILE:
        raise UsageError(f"{path} is larger than {_LARGEST_FILE >> 30} GiB: profile fewer steps")
    try:
        return _parsed(parse_json(read_input(path, _LARGEST_FILE)))
    except ValueError as error:
        raise UsageError(f"{path} is no trace of engine.profile() or infinity plan --trace: {error}") from None


def _parsed(content: Any) -> Trace:
    """Raises ValueError."""
    events = _of(dict, content, "the file").get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("traceEvents, a list, is missing")
    trace, lanes = Trace(), dict[int, str]()
    processes: set[int] = set()
    for number, event in enumerate(events):
        where = f"event {number}"
        kind = _of(dict, event, where).get("ph")
        if kind == "M":
            _read_name(trace, lanes, event, where)
        elif kind == "X":
            processes.add(_count(event, "pid", where))
            if len(processes) > 1:
                raise ValueError("it has several processes: pass the file of one rank")
            trace.work.append(_work(event, lanes, where))
        elif kind == "C":
            _read_counter(trace, event, where)
    steps = _of(dict, content.get("otherData"), "otherData").get("steps")
    if not isinstance(steps, list) or not steps:
        raise ValueError("otherData.steps, a list of steps, is missing")
    for number, step in enumerate(steps):
        trace.steps.append(_step(step, f"step {number}", trace.steps[-1].end if trace.steps else 0.0))
    return trace


def _read_name(trace: Trace, lanes: dict[int, str], event: Mapping[str, Any], where: str) -> None:
    name = _of(dict, event.get("args"), f"args of {where}").get("name")
    if event.get("name") == "process_name":
        trace.name = _of(str, name, f"the name in {where}")
    elif event.get("name") == "thread_name":
        if name not in LANES:
            raise ValueError(f"{where} names a lane that is none of {', '.join(LANES)}")
        lanes[_count(event, "tid", where)] = name


def _work(event: Mapping[str, Any], lanes: Mapping[int, str], where: str) -> Span:
    tid = _count(event, "tid", where)
    if tid not in lanes:
        raise ValueError(f"{where} is in no lane: no thread_name before it has the tid {tid}")
    args = _of(dict, event.get("args"), f"args of {where}")
    start = _number(event, "ts", where, _LARGEST_TIME) / 1e6
    end = start + _number(event, "dur", where, _LARGEST_TIME) / 1e6
    name = _of(str, event.get("name"), f"the name of {where}")
    return Span(lanes[tid], name, _count(args, "bytes", where), str(args.get("thread", "")), start, end)


def _read_counter(trace: Trace, event: Mapping[str, Any], where: str) -> None:
    name = str(event.get("name")).removesuffix(" bytes")
    tier = next((kind for kind in TierKind if kind == name), None)
    if tier is None:
        return
    time = _number(event, "ts", where, _LARGEST_TIME) / 1e6
    args = _of(dict, event.get("args"), f"args of {where}")
    trace.samples.append(Sample(time, {tier: _count(args, "bytes", where)}))


def _step(step: Any, where: str, before: float) -> StepSpan:
    """before: end of the step before."""
    values = _of(dict, step, where)
    start, seconds = (_number(values, key, where, _LARGEST_TIME / 1e6) for key in ("start", "seconds"))
    exposed = _of(dict, values.get("exposed"), f"exposed of {where}")
    if exposed.keys() - set(LANES):
        raise ValueError(f"exposed of {where} has a lane that is none of {', '.join(LANES)}")
    if start < before - _ROUNDING:
        raise ValueError(f"{where} starts before the end of the one before it")
    waited = {lane: _number(exposed, lane, where, _LARGEST_TIME / 1e6) for lane in exposed}
    return StepSpan(start, start + seconds, waited, is_complete=values.get("complete") is not False)


def _of(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is not {'an object' if kind is dict else 'a text'}")
    return value


def _number(values: Mapping[str, Any], key: str, where: str, most: float) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{key} of {where} is not a number from 0 to {most:g}")
    return float(value)


def _count(values: Mapping[str, Any], key: str, where: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST_COUNT:
        raise ValueError(f"{key} of {where} is not a whole number from 0")
    return value
