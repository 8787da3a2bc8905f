"""Formulas of DeepSpeed's learning-rate schedules, as pure functions of `iteration`.

`iteration` is the number of completed steps of the schedule minus one: a schedule starts at -1, and its first step
leads to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP_TYPES = ("log", "linear")


def warmup_fraction(iteration: int, num_steps: int, kind: str) -> float:
    """Return the progress of a warm-up, from 0 at iteration 0 (and before it) to 1 at `num_steps`, at least 2.

    kind: "log" for log(iteration + 1) / log(num_steps), or "linear".
    """
    steps = max(2, num_steps)
    if iteration >= steps:
        return 1.0
    if iteration < 0:
        return 0.0
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def decay_fraction(iteration: int, warmup_num_steps: int, total_num_steps: int) -> float:
    """Return the remainder of a linear decay from 1 at the end of the warm-up to 0 at `total_num_steps`."""
    length = max(1.0, total_num_steps - max(2, warmup_num_steps))
    return max(0.0, (total_num_steps - iteration) / length)


def cosine_fraction(iteration: int, warmup_num_steps: int, total_num_steps: int) -> float:
    """Return the remainder of a decay along half a cosine, which is 1 one iteration before the end of the warm-up and 0
    from `total_num_steps` - 1 on.
    """
    first = max(2, warmup_num_steps)
    done = min(1.0, (iteration - first + 1) / max(1, total_num_steps - first))
    return (1.0 + math.cos(math.pi * done)) / 2


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
