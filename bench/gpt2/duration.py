"""How many steps a training job makes when nobody gives their number: as many as fit in `JOB_SECONDS`.

The first `MEASURED_STEPS` steps show the machine's speed. They must not depend on the number chosen after them, so the
warm-up of the learning rate has to last at least as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

JOB_SECONDS = 150.0
"""Seconds of the whole command, from the start of its process to its end."""
MEASURED_STEPS = 25
SKIPPED_STEPS = 5
"""First steps that are not measured: they allocate, record the trace that prefetch follows, and fill caches."""
MIN_STEPS = 50
"""Fewer leave no time for a learning rate that rises over `MEASURED_STEPS` to fall again."""
MAX_PASSES = 4
"""Passes over the text. Repeating it more often teaches little (Muennighoff et al., "Scaling data-constrained language
models", 2023)."""


def show_seconds(seconds: float) -> str:
    """92.4 -> '1:32', 7322 -> '2:02:02'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class Costs:
    """Seconds that a job has taken so far and that it will take."""

    elapsed: float
    """Since the job's process started."""
    step: float
    """A further step, with its share of the evaluations between steps."""
    closing: float
    """Everything after the last step: evaluation, checkpoint, sample, loss curve."""


def max_steps(text_bytes: int, bytes_per_step: int) -> int:
    """Steps in `MAX_PASSES` passes over the text, but not below `MIN_STEPS`."""
    return max(MIN_STEPS, MAX_PASSES * text_bytes // bytes_per_step)


def choose_steps(costs: Costs, *, done: int, most: int, seconds: float = JOB_SECONDS) -> int:
    """Return the number of steps, including the `done` ones, after which the job ends within `seconds`.

    The result lies between `MIN_STEPS` and `most`, even if the job then takes longer or less long.
    """
    left = seconds - costs.elapsed - costs.closing
    fitting = done + int(max(0.0, left) / max(costs.step, 1e-6))  # a coarse clock may measure 0 seconds
    return max(MIN_STEPS, min(most, fitting))


def step_seconds(measured: Sequence[float]) -> float:
    """Mean duration of a step. measured: seconds of every step so far, of which the first are left out.

    The mean, since the sum of the steps to come is wanted: slow ones count as often as they occur.
    """
    steady = measured[SKIPPED_STEPS:]
    return sum(steady) / len(steady)


def show_choice(steps: int, costs: Costs, *, done: int, most: int) -> str:
    """One line that states the choice, its reason and the flag that overrides it."""
    bound = ", the minimum" if steps == MIN_STEPS else f", {MAX_PASSES} passes over the text" if steps == most else ""
    seconds = costs.elapsed + (steps - done) * costs.step + costs.closing
    later = f", later than {show_seconds(JOB_SECONDS)}" if steps == MIN_STEPS and seconds > JOB_SECONDS else ""
    end = f"the job ends after about {show_seconds(seconds)}{later}"
    return f"steps: {steps:,}{bound}; at {costs.step:.3f} s each {end} (--train-iters overrides)"


def process_seconds() -> float:
    """Seconds since this process started, by a monotonic clock. They include the interpreter's start and imports."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5), after pid and "(comm)"
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
