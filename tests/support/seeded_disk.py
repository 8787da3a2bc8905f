"""An nvme tier for tests that carries transfers out in any order that nothing forbids.

A transfer is carried out when somebody waits for it, or at some earlier moment that a seed draws: after reads and
writes that were issued later, if nobody waited in between. Its bytes are copied at that moment and not before: a write
takes what is in memory then, a read what is in the file then, and until then its destination is NaN. A wait that is
missing gives other results, by some seeds at least; where all waits are there, every seed gives the same.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from infinity import assembly
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.placement import Extent
from infinity.tiers.transfer import Transfer


class Schedule:
    """The transfers that are issued and not yet carried out, on all tiers of a test.

    drift: how probable it is, whenever something is issued or asked for, that a transfer nobody waits for is carried
    out. before_write: called before a write is carried out because somebody waits for it, in the waiter's thread.
    """

    def __init__(self, seed: int, *, drift: float = 0.25, before_write: Callable[[], None] = lambda: None) -> None:
        self.out_of_order = 0
        """Transfers that were carried out while one issued before was not."""
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
        """Time passes: some transfers, or none, are carried out."""
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
        """Carry out what nobody waited for."""
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
    """Engines that are made in this test have disks with this schedule."""

    class SeededNvmeTier(NvmeTier):
        def _read(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            memory.fill_(0xFF)
            return schedule.issue(lambda: NvmeTier._read(self, extent, memory, offset).wait(), write=False)

        def _write(self, extent: Extent, memory: torch.Tensor, offset: int) -> Transfer:
            return schedule.issue(lambda: NvmeTier._write(self, extent, memory, offset).wait(), write=True)

        def close(self) -> None:
            schedule.end()
            super().close()

    monkeypatch.setattr(assembly, "NvmeTier", SeededNvmeTier)
