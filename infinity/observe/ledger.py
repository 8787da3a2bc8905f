"""The ledger: bytes each tier holds and moves, and where the time went. Everything in it was measured.

A wait of the model's threads has two times: how long the thread slept, and how long the model's compute stood still
meanwhile. They are equal where the host computes. A device continues with queued work while a thread sleeps, so events
on its stream measure the second (`infinity.tiers.stalls.StreamWaits`).
"""

from __future__ import annotations

import resource
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from infinity.concurrency import now
from infinity.observe.recording import Stamp
from infinity.tier_kind import TierKind

REASONS = {
    "parameters": "a unit arrives, or its buffer is read or written",
    "update": "the optimizer step of a unit ends",
    "gradients": "a buffer of gradients is free, or a gradient has arrived",
    "norm": "the squares of all gradients are summed",
    "edits": "compute ends, so that the fingerprint of a unit is known",
    "loss": "compute ends, so that the loss or a time of the step is known",
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


@dataclass(frozen=True)
class Snapshot:
    """Counters since the engine was made; subtract two to get what happened between them.

    Bytes: nvme_bytes_read, nvme_bytes_written (this rank's states), activation_bytes_read, activation_bytes_written
    (this rank's saved activations, between the device and their tier), all_gather_bytes, reduce_scatter_bytes (of whole
    units).
    Seconds: seconds (on the clock), wait_seconds (the model's compute stood still, for all reasons of
    `Ledger.waits`), update_seconds (in Adam's kernels, beside the model
    or not). updated_elements: parameters updated. fetches: units fetched. blocks_repaired: blocks read from nvme whose
    bytes did not match their checksum at first, and did when they were read again.
    """

    seconds: float
    wait_seconds: float
    update_seconds: float
    nvme_bytes_read: int
    nvme_bytes_written: int
    activation_bytes_read: int
    activation_bytes_written: int
    all_gather_bytes: int
    reduce_scatter_bytes: int
    updated_elements: int
    fetches: int
    blocks_repaired: int

    def __sub__(self, other: Snapshot) -> Snapshot:
        return Snapshot(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Ledger:
    """Read-only view on what an engine holds and has moved."""

    def __init__(
        self,
        counters: Callable[[], dict[str, float]],
        tier_bytes: Callable[[], dict[TierKind, int]],
        device_peak: Callable[[], int],
        waits: Waits,
        spare: Callable[[], str],
    ) -> None:
        self._counters = counters
        self._tier_bytes = tier_bytes
        self._device_peak = device_peak
        self._waits = waits
        self.spare = spare
        """Returns a sentence on device memory that no step so far has taken; empty: none that states could use."""
        self._waits_before = waits.so_far()
        """Waits of engines that had the device before."""
        self._began = now()

    def snapshot(self) -> Snapshot:
        """Return the present counters."""
        stood_still = sum(wait.stood_still for wait in self.waits().values())
        return Snapshot(seconds=now() - self._began, wait_seconds=stood_still, **self._counters())  # type: ignore[arg-type]

    def waits(self) -> dict[str, Waited]:
        """Return the waits of the model's threads for the engine so far, by reason (`infinity.observe.ledger.REASONS`).

        slept: seconds for which a thread slept. stood_still: seconds for which the model's compute stood still
        meanwhile; fewer on a device, which continues with queued work.
        Engines that are given one device at the same time share these counts.
        """
        return between(self._waits_before, self._waits.so_far())

    def tier_bytes(self) -> dict[TierKind, int]:
        """Return the bytes that this rank's engine has reserved in each tier: "device", "host", "nvme"."""
        return self._tier_bytes()

    @property
    def host_peak_bytes(self) -> int:
        """The most memory this process has had resident so far, torch and Python included."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory torch has had allocated so far; 0 where the device is the host."""
        return self._device_peak()
