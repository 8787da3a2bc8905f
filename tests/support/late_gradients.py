"""A gradient that reaches its tier as late as can be: once somebody waits for all gradients, whatever the machine's
speed. It is that of the first unit, the last of a backward, which needs the buffers of the others.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infinity.grads.buffers import Sent
from infinity.grads.landing import Landing
from infinity.grads.store import GradStore
from infinity.tiers.transfer import Transfer

PATIENCE = 20.0
"""Seconds after which they arrive all the same; tests fail then, as nothing waited."""


class LateWrite:
    """A write that the gate holds."""

    def __init__(self, write: Transfer, gate: threading.Event) -> None:
        self._write, self._gate = write, gate
        self._ended = False

    def wait(self) -> None:
        self._gate.wait(PATIENCE)
        self._write.wait()
        self._ended = True

    def done(self) -> bool:
        return self._ended


class LateGradients:
    """Holds the next gradient of the first unit until `GradStore.settle` or `discard` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Event()
        self._write: LateWrite | None = None
        store = Landing.store

        def late(landing: Landing, sent: Sent, **options: Any) -> Any:
            is_first = sent.unit.index == 0
            gradient, stored = store(landing, sent, **options)
            if not is_first or self._write is not None:
                return gradient, stored
            self._write = LateWrite(stored, self._gate)
            return gradient, self._write

        monkeypatch.setattr(Landing, "store", late)
        for name in ("settle", "discard"):
            monkeypatch.setattr(GradStore, name, self._opening(getattr(GradStore, name)))

    @property
    def are_stored(self) -> bool:
        """True once the gradient is in its tier."""
        return self._write is not None and self._write.done()

    def free(self) -> None:
        self._gate.set()

    def _opening(self, method: Any) -> Any:
        def opened(store: GradStore) -> None:
            self._gate.set()
            method(store)

        return opened
