"""Measures the phases of a training step: on the host's clock, and on CUDA by events.

Counts the floating-point operations of one forward by module, with torch's FlopCounterMode.

It counts matrix products, convolutions and attention (`torch.utils.flop_counter`); an addition and a multiplication are
two operations.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.concurrency import now
from infinity.observe.ledger import Ledger
from infinity.observe.log import logger
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Recording
from infinity.sizes import show_count, show_flops

Mark: TypeAlias = "float | torch.cuda.Event"


class Phase(str, Enum):
    """Phases of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class StepClock:
    """Seconds in each phase. A backward inside a forward, as of a gradient penalty, counts as forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: tuple[Phase, Mark] | None = None
        self._spans: list[tuple[Phase, Mark, Mark]] = []

    def begin(self, phase: Phase) -> None:
        """Start `phase`. Replaces a phase that an exception left open. No-op for a backward inside a phase."""
        if phase is not Phase.BACKWARD or self._open is None:
            self._open = phase, self._mark()

    def end(self, phase: Phase) -> None:
        """End `phase`. No-op unless it is the present one."""
        if self._open is not None and self._open[0] is phase:
            self._spans.append((*self._open, self._mark()))
            self._open = None

    def read(self) -> dict[Phase, float]:
        """Return the seconds in each phase since the last call. On CUDA, wait for the device."""
        seconds = dict.fromkeys(Phase, 0.0)
        for phase, first, last in self._spans:
            seconds[phase] += _between(first, last)
        self._spans.clear()
        return seconds

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(first: Mark, last: Mark) -> float:
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float) and isinstance(last, float)
        return last - first
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


class ClockLog:
    """Logs a line every `every` steps: the seconds of a step and of its phases, those in which the model waited for
    units and gradients, and for which lanes in the step that logs.
    """

    def __init__(self, ledger: Ledger, recorder: Recorder, every: int) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self._recording: Recording | None = None
        """The recording of a step that will log."""
        self._every = every
        self._last, self._steps = ledger.snapshot(), 0
        self._spent = dict.fromkeys(Phase, 0.0)
        self.expect(1)

    def expect(self, number: int) -> None:
        """Record step `number`, which begins, if it will log. Ends the recording of another step."""
        if self._recording is not None:
            self._recorder.stop(self._recording)
        self._recording = self._recorder.start(steps=1) if self.is_due(number) else None

    def is_due(self, number: int) -> bool:
        """Return whether step `number` logs the line."""
        return number % self._every == 0

    def step(self, number: int, spent: dict[Phase, float]) -> None:
        """Add `spent`, the seconds since the last call, and log the line if step `number` is due."""
        for phase, seconds in spent.items():
            self._spent[phase] += seconds
        if not self.is_due(number):
            return
        present = self._ledger.snapshot()
        steps, since = max(1, number - self._steps), present - self._last
        means = {phase: seconds / steps for phase, seconds in self._spent.items()}
        whole = since.seconds / steps
        logger.info(
            "wall clock, step %d: %.3g s a step: %s, outside %.3g; waited %.3g%s",
            number,
            whole,
            ", ".join(f"{phase.value} {seconds:.3g}" for phase, seconds in means.items()),
            max(0.0, whole - sum(means.values())),
            since.wait_seconds / steps,
            self._exposed(),
        )
        self._last, self._steps = present, number
        self._spent = dict.fromkeys(Phase, 0.0)

    def _exposed(self) -> str:
        """Return the text about the lanes that the model waited for in the step; "" if it was not recorded, as after
        a checkpoint of another step was loaded.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return ""
        self._recorder.stop(recording)
        exposed = recording.timeline(now()).steps[0].exposed
        lanes = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in exposed.items())
        return f"; exposed in this step: {lanes or 'nothing'}"


_T = TypeVar("_T")


@dataclass(frozen=True)
class FlopCount:
    """Operations of one forward of `model`."""

    model: nn.Module
    total: int
    by_module: dict[str, int]
    """Name of each module with operations, "" for the root → its operations, those of its children included."""
    seconds: float
    """Duration of the forward, counting included."""

    def summary(self) -> str:
        """Return one line: operations, parameters, seconds and the rate, which counting lowers."""
        return (
            f"{show_flops(self.total)} in the forward of one micro-batch on one rank, for "
            f"{show_count(_size(self.model))} parameters; {self.seconds:.3g} s with counting, so at least "
            f"{show_flops(self.total / self.seconds)}/s"
        )

    def largest(self, depth: int, top: int) -> Iterator[str]:
        """Yield a line for each depth of the module tree: the `top` classes with the most operations.

        depth: the largest depth; -1: all depths.
        """
        kinds: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, flops in self.by_module.items():
            kinds[_depth(name)][type(modules[name]).__name__] += flops
        for level in sorted(kinds):
            if depth < 0 or level <= depth:
                most = sorted(kinds[level].items(), key=lambda item: -item[1])[:top]
                yield f"depth {level}: " + ", ".join(f"{kind} {show_flops(flops)}" for kind, flops in most)

    def tree(self) -> Iterator[str]:
        """Yield a line for each module with operations, in the order of the model."""
        for name, module in self.model.named_modules(remove_duplicate=False):
            if name in self.by_module:
                flops = self.by_module[name]
                title = f"{'  ' * _depth(name)}{name or 'the model'} ({type(module).__name__})"
                share = 100 * flops / self.total
                yield f"{title}: {show_count(_size(module))} parameters, {show_flops(flops)}, {share:.1f} %"


def count_flops(
    model: nn.Module, call: Callable[[], _T], synchronize: Callable[[], None] | None = None
) -> tuple[_T, FlopCount]:
    """Run `call`, a forward of `model`, and return its result and its operations.

    synchronize: waits for the device, before and after.
    """
    wait = synchronize or (lambda: None)
    wait()
    began = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        result = call()
    wait()
    seconds = time.perf_counter() - began
    root = type(model).__name__
    names = {root: "", **{f"{root}.{name}": name for name, _ in model.named_modules(remove_duplicate=False) if name}}
    counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
    by_module = {names[name]: sum(by_operation.values()) for name, by_operation in counts.items() if name in names}
    return result, FlopCount(model, counter.get_total_flops(), by_module, seconds)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def waiter(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for `device`; None if the device is the host."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
