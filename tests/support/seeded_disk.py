"""An nvme tier for tests that carries transfers out in any permitted order, drawn from a seed.

A transfer is carried out when it is waited for, or at an earlier moment that the seed draws, even after transfers that
were issued later, unless a wait came in between. It copies its bytes at that moment: a write reads memory then, a read
reads the file then, and the destination of a read is NaN until then. A missing wait changes the results for some seeds.
With all waits in place every seed gives the same results.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from infinity.plan.placement import Extent
from infinity.tiers import open_tiers
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.transfer import Transfer


class Schedule:
    """Transfers issued and not yet carried out, on all tiers of a test.

    drift: probability, at each issue or query, that a transfer is carried out without a wait.
    before_write: called before a write is carried out because of a wait, in the waiter's thread.
    """

    def __init__(self, seed: int, *, drift: float = 0.25, before_write: Callable[[], None] = lambda: None) -> None:
        self.out_of_order = 0
        """Number of transfers carried out before one that was issued earlier."""
        self.before_write = before_write
        self._drift = drift
        self._random = random.Random(seed)
        self._pending: list[SeededTransfer] = []
        self._turn = threading.RLock()

    def issue(self, carry_out: Callable[[], None], *, write: bool) -> SeededTransfer:
        transfer = SeededTransfer(self, carry_out, write)
        with self._turn:
            self._pending.append(transfer)
            self.drift()
        return transfer

    def drift(self) -> None:
        """Let time pass: carry out some transfers, or none."""
        with self._turn:
            while self._pending and self._random.random() < self._drift:
                self.complete(self._random.choice(self._pending))

    def complete(self, transfer: SeededTransfer) -> None:
        with self._turn:
            if transfer in self._pending:
                self.out_of_order += transfer is not self._pending[0]
                self._pending.remove(transfer)
                transfer.execute()

    def end(self) -> None:
        """Carry out the remaining transfers."""
        with self._turn:
            while self._pending:
                self.complete(self._random.choice(self._pending))


class SeededTransfer:
    """One read or write."""

    def __init__(self, schedule: Schedule, carry_out: Callable[[], None], write: bool) -> None:
        self._schedule = schedule
        self._carry_out: Callable[[], None] | None = carry_out
        self._error: BaseException | None = None
        self._write = write

    def execute(self) -> None:
        carry_out, self._carry_out = self._carry_out, None
        assert carry_out is not None
        try:
            carry_out()
        except BaseException as error:  # noqa: BLE001 - raised by wait
            self._error = error

    def wait(self) -> None:
        if self._write and not self._is_over():
            self._schedule.before_write()
        self._schedule.drift()
        self._schedule.complete(self)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        self._schedule.drift()
        return self._is_over()

    def _is_over(self) -> bool:
        return self._carry_out is None


def use_seeded_disks(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    """Give engines made in this test disks with this schedule."""

    class SeededNvmeTier(NvmeTier):
        def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            memory.fill_(0xFF)
            return schedule.issue(lambda: NvmeTier._read(self, extent, memory, offset).wait(), write=False)

        def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            return schedule.issue(lambda: NvmeTier._write(self, extent, memory, offset).wait(), write=True)

        def close(self) -> None:
            schedule.end()
            super().close()

    monkeypatch.setattr(open_tiers, "NvmeTier", SeededNvmeTier)
