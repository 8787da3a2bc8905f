"""A heartbeat waits for reports of lost ranks that are in transit."""

from __future__ import annotations

from typing import Any

from infinity.comm.liveness.heartbeat import Heartbeat


class Late:
    """The threads of a heartbeat whose report arrives while somebody waits for it."""

    def __init__(self) -> None:
        self.is_reported = self
        self._cause = ""

    def wait(self, timeout: float) -> bool:
        self._cause = "rank 1 is lost"
        return True

    def cause(self) -> str:
        return self._cause


def test_the_cause_is_waited_for() -> None:
    """A collective may fail before the report arrives that explains it."""
    heartbeat: Any = Heartbeat.__new__(Heartbeat)
    heartbeat._watch = Late()
    assert heartbeat.cause() == "rank 1 is lost"
