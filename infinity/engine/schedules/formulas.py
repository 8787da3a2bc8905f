"""Formulas of the learning-rate schedules, as pure functions of `iteration`. Both front doors use them.

A front door sets `first_iteration`, the iteration of the first update: 0 for the schedulers of a config, -1 for
DeepSpeed's classes, whose first `step` leads to 0. Warm-ups and linear decays count iterations, and all other
schedules count the updates before this one, iteration - first_iteration, as DeepSpeed's do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP_TYPES = ("log", "linear")
CONFIG, DEEPSPEED = 0, -1
"""`first_iteration` of the two front doors."""


@dataclass(frozen=True)
class Warmup:
    """Shape of a schedule with a warm-up: WarmupLR, WarmupDecayLR or WarmupCosineLR.

    num_steps: iterations of the warm-up. kind: "log" for log(iteration + 1) / log(num_steps), or "linear". decay:
    shape of the fall after the warm-up, "linear" or "cosine"; None for a constant rate. total: iterations until the
    end of the fall.
    """

    num_steps: int
    kind: str
    first_iteration: int
    decay: str | None = None
    total: int = 0

    def rate(self, iteration: int, start: float, high: float, end: float) -> float:
        """Return the rate: from `start` at iteration 0 to `high` after the warm-up, then towards `end`."""
        if iteration < self.num_steps or self.decay is None:
            return start + (high - start) * self.rise(iteration)
        return end + (high - end) * (self._cosine(iteration) if self.decay == "cosine" else self._line(iteration))

    def rise(self, iteration: int) -> float:
        """Return the progress of the warm-up, from 0 at iteration 0 (and before it) to 1 at `num_steps`."""
        if iteration >= self.num_steps:
            return 1.0
        if iteration < 0:
            return 0.0
        if self.kind == "linear":
            return iteration / self.num_steps
        return math.log(iteration + 1) / math.log(max(2, self.num_steps))

    def _line(self, iteration: int) -> float:
        length = max(1, self.total - self.num_steps)
        # The two agree except for rounding, and for a warm-up that takes all iterations.
        if self.first_iteration == CONFIG:
            return 1.0 - min(1.0, (iteration - self.num_steps) / length)
        return max(0.0, (self.total - iteration) / length)

    def _cosine(self, iteration: int) -> float:
        done = (iteration - self.first_iteration - self.num_steps) / max(1, self.total - self.num_steps)
        return (1.0 + math.cos(math.pi * min(1.0, done))) / 2


def range_test_factor(iteration: int, step_size: int, step_rate: float, *, staircase: bool) -> float:
    """Return the factor of the lowest rate in a learning-rate range test: 1 + step_rate × intervals of `step_size`.

    staircase: count only complete intervals.
    """
    intervals = (iteration + 1) / step_size
    return 1.0 + step_rate * (math.floor(intervals) if staircase else intervals)


@dataclass(frozen=True)
class Cycle:
    """Shape of a 1Cycle schedule: one rise and fall of the rate, then a decay.

    first, second: iterations of the rise and of the fall. first_stairs, second_stairs: number of steps in which they
    proceed; 0 for a continuous change. decay_step_size: iterations of one unit of decay; 0 for none.
    """

    first: float
    second: float
    first_stairs: int = 0
    second_stairs: int = 0
    decay_step_size: float = 0

    @property
    def length(self) -> float:
        """Iterations of rise and fall."""
        return self.first + self.second

    def has_ended(self, iteration: int) -> bool:
        """Return True if the decay has begun."""
        return iteration >= self.length

    def height(self, iteration: int) -> float:
        """Return the position between the lowest value, 0, and the highest, 1. The cycle repeats."""
        inside = (iteration + 1) % self.length
        rises = inside <= self.first
        left, stairs = (inside, self.first_stairs) if rises else (self.length - inside, self.second_stairs)
        half = self.first if rises else self.second
        return math.floor(left * stairs / half) / stairs if stairs > 0 else left / half

    def decay_intervals(self, iteration: int) -> float:
        """Return the number of decay intervals since the end of the cycle; 0 without decay."""
        if math.isclose(self.decay_step_size, 0):
            return 0.0
        return (iteration - self.length + 1) / self.decay_step_size

    def rate(self, iteration: int, low: float, high: float, decay_rate: float) -> float:
        """Return the learning rate: from `low` to `high` and back, then low / (1 + decay_rate × intervals)."""
        if not self.has_ended(iteration):
            return low + (high - low) * self.height(iteration)
        return low / (1.0 + decay_rate * self.decay_intervals(iteration))

    def momentum(self, iteration: int, low: float, high: float, decay_rate: float) -> float:
        """Return the momentum: from `high` to `low` and back, then high × (1 + decay_rate × intervals)."""
        if not self.has_ended(iteration):
            return high - (high - low) * self.height(iteration)
        return high * (1.0 + decay_rate * self.decay_intervals(iteration))
