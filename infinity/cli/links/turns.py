"""Measurements in turns: all kinds in every round, in an order that rotates, so that what else runs meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from infinity.cli.console import Step

Rate = Callable[[float], float]
"""Works for about that many seconds. Returns the bytes, or FLOP, of a second."""

ROUNDS, FEWEST_ROUNDS = 7, 3
_SHORTEST_TURN = 0.05
_WARM = 0.02
"""Seconds of the calls from which the time of one is estimated."""


class Calls:
    """Rate of equal calls.

    run: issues that many calls and returns when all have ended. amount: bytes, or FLOP, of one call.
    """

    def __init__(self, run: Callable[[int], None], amount: float) -> None:
        self._run, self.amount = run, amount
        run(1)  # touches memory, compiles, connects
        calls, spent = 1, self._seconds(1)
        self.seconds = min(spent, self._seconds(1))
        """Seconds of one call, roughly."""
        while spent < _WARM:
            calls *= 2
            spent = self._seconds(calls)
            self.seconds = spent / calls

    def __call__(self, seconds: float) -> float:
        calls = max(1, round(seconds / self.seconds))
        return calls * self.amount / self._seconds(calls)

    def _seconds(self, calls: int) -> float:
        began = time.perf_counter()
        self._run(calls)
        return time.perf_counter() - began


def measure(
    rates: Mapping[str, Rate], seconds: float, step: Step, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the rates of each kind, one a round, measured for about `seconds` in all.

    Performs up to `ROUNDS` rounds, and at least `FEWEST_ROUNDS` however long they take.
    """
    began = clock()
    rounds = min(ROUNDS, max(FEWEST_ROUNDS, int(seconds / len(rates) / _SHORTEST_TURN)))
    turn = max(0.0, seconds) / len(rates) / rounds
    samples: dict[str, list[float]] = {name: [] for name in rates}
    names = list(rates)
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and clock() - began > seconds - turn * len(names) / 2:
            break
        first = number % len(names)
        for place, name in enumerate([*names[first:], *names[:first]]):
            step((number + place / len(names)) / rounds, f"measuring; {name}, round {number + 1} of {rounds}")
            samples[name].append(rates[name](turn))
    return samples


def unsteady(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the kinds whose rates differ between rounds by more than half of their median."""
    return [name for name, values in samples.items() if max(values) - min(values) > median(values) / 2]
