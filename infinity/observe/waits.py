"""Waits of the model's threads: how long each slept, and how long the model's compute stood still meanwhile.

The two are equal where the host computes. A device continues with queued work while a thread sleeps, so events on its
stream measure the second (`infinity.tiers.stalls.StreamWaits`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.concurrency import now
from infinity.observe.recording import Stamp

REASONS = {
    "parameters": "a unit arrives, or its buffer is read or written",
    "update": "the optimizer step of a unit ends",
    "gradients": "a buffer of gradients is free, or a gradient has arrived",
    "norm": "the squares of all gradients are summed",
    "edits": "compute ends, so that the fingerprint of a unit is known",
    "loss": "compute ends, so that the loss is known",
    "small copies": "a computed loss, sum or result of a comparison arrives in host memory",
    "collectives": "other ranks take part in a collective",
    "activations": "a saved activation arrives or leaves",
    "saves": "a snapshot, or the commit of a durable run, has read the states",
}
"""Reason of a wait → the event that it waits for."""


@dataclass(frozen=True)
class Waited:
    """Waits for one reason. slept: seconds on the host's clock. stood_still: seconds for which compute stood still."""

    count: int
    slept: float
    stood_still: float


def between(before: Mapping[str, Waited], after: Mapping[str, Waited]) -> dict[str, Waited]:
    """Return reason → the waits between two readings; reasons without one are left out."""
    none = Waited(0, 0.0, 0.0)
    pairs = {reason: (one, before.get(reason, none)) for reason, one in after.items()}
    return {
        reason: Waited(now.count - then.count, now.slept - then.slept, now.stood_still - then.stood_still)
        for reason, (now, then) in pairs.items()
        if now != then
    }


class Waits:
    """Waits of threads that compute in host memory. Thread-safe."""

    def __init__(self) -> None:
        self._slept: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._access = threading.Lock()

    def begin(self) -> Any:
        """Return the beginning of a wait of the calling thread, for `end`."""
        return now()

    def end(self, began: Any, reason: str) -> Any:
        """Count a wait of the calling thread, for a reason of `REASONS`. Returns it, for `stamps`."""
        ended = now()
        self._count(reason, ended - began)
        return began, ended

    def stamps(self, wait: Any) -> tuple[Stamp, Stamp]:
        """Return the times between which compute stood still in a wait."""
        began, ended = wait
        return began, ended

    def so_far(self) -> dict[str, Waited]:
        """Return reason → the waits of the model's threads so far."""
        still = self._stood_still()
        with self._access:
            return {
                reason: Waited(int(count), seconds, still.get(reason, 0.0))
                for reason, (count, seconds) in self._slept.items()
            }

    def _stood_still(self) -> Mapping[str, float]:
        """Return reason → seconds for which the model's compute stood still so far."""
        with self._access:
            return {reason: seconds for reason, (_, seconds) in self._slept.items()}

    def _count(self, reason: str, seconds: float) -> None:
        with self._access:
            slept = self._slept[reason]
            slept[0] += 1
            slept[1] += seconds
