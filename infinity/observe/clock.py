"""Measures the phases of a training step: on the host's clock, and on CUDA by events."""

from __future__ import annotations

import time
from enum import Enum
from typing import TypeAlias

import torch

from infinity.concurrency import now
from infinity.observe.ledger import Ledger
from infinity.observe.log import logger
from infinity.observe.recorder import Recorder
from infinity.observe.recording import Recording

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
