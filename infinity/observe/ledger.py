"""The ledger: bytes each tier holds and moves, and where the time went. Everything in it was measured."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass, fields

from infinity.concurrency import now
from infinity.observe.waits import Waited, Waits, between
from infinity.tier_kind import TierKind


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
    ) -> None:
        self._counters = counters
        self._tier_bytes = tier_bytes
        self._device_peak = device_peak
        self._waits = waits
        self._waits_before = waits.so_far()
        """Waits of engines that had the device before."""
        self._began = now()

    def snapshot(self) -> Snapshot:
        """Return the present counters."""
        stood_still = sum(wait.stood_still for wait in self.waits().values())
        return Snapshot(seconds=now() - self._began, wait_seconds=stood_still, **self._counters())  # type: ignore[arg-type]

    def waits(self) -> dict[str, Waited]:
        """Return the waits of the model's threads for the engine so far, by reason (`infinity.observe.waits.REASONS`).

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
