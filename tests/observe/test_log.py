"""The log of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.observe.ledger import Snapshot
from infinity.observe.log import StepLog
from infinity.observe.recorder import Recorder


class FakeLedger:
    """Memory is left, and nothing has been counted."""

    def snapshot(self) -> Snapshot:
        return Snapshot(*[1] * 12)

    def spare(self) -> str:
        return "2 bytes are left"


@pytest.mark.parametrize("every, lines", [(0, 0), (100, 1)])
def test_memory_that_steps_leave_is_logged_once(every: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """After the third step of this engine, whatever the number of its first one."""
    ledger: Any = FakeLedger()
    log = StepLog(ledger, Recorder(), every)
    with caplog.at_level("INFO", "infinity"):
        for number in range(41, 50):
            assert len(caplog.messages) == (lines if number > 43 else 0)
            log.step(number, torch.tensor(1.0), 1e-3, None)
    assert caplog.messages == ["2 bytes are left"] * lines
