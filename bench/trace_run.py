"""Steps of a loop under torch.profiler and the sampler of frames. Parts that fail leave notes; the steps go on."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import kineto
import training
from frame_sampler import FrameSampler, Sample

T = TypeVar("T")
MARKS = 5
STEP = "gpu_trace step "
"""Start of the annotations of traced steps, before the number."""


@dataclass
class Run:
    """Results of traced steps. steps: perf_counter_ns at their starts and ends."""

    untraced: list[float] = field(default_factory=list)
    traced: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    marks: list[kineto.Mark] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sampler: dict[str, float] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    loss: float = float("nan")
    exported: str = ""
    notes: list[str] = field(default_factory=list)

    def attempt(self, what: str, call: Callable[[], T], missing: T) -> T:
        """Call; if it fails, note it and return `missing`."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the rest of the result is worth having
            traceback.print_exc()
            self.notes.append(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return missing


# -- steps -------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, run: Run, loop: Any) -> None:
    """Train: warm up, then trace."""
    import torch
    from torch.profiler import record_function

    batch = training.random_batches(args)

    def step(name: str) -> float:
        tokens, targets = (part.to(args.device) for part in batch())
        began = time.perf_counter_ns()
        with record_function(name):
            run.loss = float(loop.step(tokens, targets))
        ended = time.perf_counter_ns()
        if name.startswith(STEP):
            run.steps.append((began, ended))
        return (ended - began) / 1e9

    def mark(group: str) -> None:
        for number in range(MARKS):
            name = f"gpu_trace {group} {number}"
            before = time.perf_counter_ns()
            with record_function(name):
                after = time.perf_counter_ns()
            run.marks.append(kineto.Mark(group, name, before, after))

    for _ in range(args.warm_up):
        run.untraced.append(step("gpu_trace warm-up"))
        print(f"warm-up: {run.untraced[-1]:.4g} s", file=sys.stderr, flush=True)
    profiler = run.attempt("the profiler", lambda: start_profiler(args.device, run.notes), None)
    sampler = FrameSampler() if args.frames else None
    try:
        with sampler or nullcontext():
            mark("begin")
            step("gpu_trace settling")  # the profiler's own first events, and kernels before the first step
            before = run.attempt("counters", lambda: counters(loop), dict[str, Any]())
            for number in range(args.steps):
                run.traced.append(step(f"{STEP}{number}"))
            run.counters = difference(before, run.attempt("counters", lambda: counters(loop), dict[str, Any]()))
            if args.device != "cpu":
                torch.accelerator.synchronize()
            mark("end")
    finally:
        if profiler is not None:
            run.attempt("the end of the profiler", profiler.stop, None)
    if sampler is not None:
        run.samples = run.attempt("samples", sampler.samples, [])
        run.sampler = run.attempt("the sampler's intervals", lambda: sampled(sampler), {})
        if sampler.error:
            run.notes.append(sampler.error)
    if profiler is not None:
        run.exported = run.attempt("the export of the trace", lambda: export(profiler), "")


def start_profiler(device: str, notes: list[str]) -> Any:
    """Return a running profiler of the host and, where it can, of the device."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    wanted = getattr(ProfilerActivity, device.upper(), ProfilerActivity.CPU)
    activities = [ProfilerActivity.CPU]
    if wanted in supported_activities() and wanted != ProfilerActivity.CPU:
        activities.append(wanted)
    elif device != "cpu":
        notes.append(f"torch's profiler does not support {device}")
    try:
        profiler = profile(activities=activities)
        profiler.start()
    except Exception as error:  # operators alone show the host's part
        if len(activities) == 1:
            raise
        notes.append(f"the profiler of {device} did not start: {' '.join(str(error).split())[:200]}")
        profiler = profile(activities=[ProfilerActivity.CPU])
        profiler.start()
    return profiler


def export(profiler: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_text(encoding="utf-8", errors="replace")


def sampled(sampler: FrameSampler) -> dict[str, float]:
    intervals = [1e3 * one for one in sampler.intervals()]
    if not intervals:
        return {}
    count = len(intervals)
    return {
        "samples": count + 1,
        "median_ms": intervals[count // 2],
        "p95_ms": intervals[count * 95 // 100],
        "longest_ms": intervals[-1],
    }


def counters(loop: Any) -> dict[str, Any]:
    """Return the numbers of the engine's snapshot, and the mappings of numbers in it and in its ledger."""
    ledger = getattr(getattr(loop, "engine", None), "ledger", None)
    if ledger is None:
        return {}
    snapshot = ledger.snapshot()
    names = [one.name for one in dataclasses.fields(snapshot)] if dataclasses.is_dataclass(snapshot) else []
    names = list(dict.fromkeys([*names, *(name for name in dir(snapshot) if not name.startswith("_"))]))
    found = {name: getattr(snapshot, name, None) for name in names}
    of_ledger = {name: getattr(ledger, name, None) for name in dir(ledger) if not name.startswith("_")}
    found |= {name: value for name, value in of_ledger.items() if isinstance(value, (float, Mapping))}
    numbers = {name: _numbers(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _numbers(value: Any) -> float | dict[str, float] | None:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): float(one) for key, one in value.items() if isinstance(one, (int, float))}
    return None


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `after` minus `before`, also within mappings. An entry that was missing was 0."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, Mapping):
            found[name] = difference(earlier if isinstance(earlier, Mapping) else {}, value)
        else:
            found[name] = value - (earlier if isinstance(earlier, (int, float)) else 0)
    return found
