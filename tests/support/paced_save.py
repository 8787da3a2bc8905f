"""A save in the background that is as slow as can be: after each unit it stops until somebody waits for one that it has
not read. So every update of the step that follows meets a unit that is not saved, whatever the machine's speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest

from infinity.checkpoint.background import Saving
from infinity.checkpoint.piecewise import PiecewiseFile
from infinity.checkpoint.tensors import Spec
from infinity.checkpoint.writer import Writer
from infinity.tiers.transfer import Transfer

PATIENCE = 20.0
"""Seconds after which it goes on all the same; tests fail then, as nothing waited."""


class Watched:
    """A transfer that reports waits before it is done."""

    def __init__(self, transfer: Transfer, waited: Callable[[], None]) -> None:
        self._transfer, self._waited = transfer, waited

    def wait(self) -> None:
        if not self._transfer.done():
            self._waited()
        self._transfer.wait()

    def done(self) -> bool:
        return self._transfer.done()


class Pace:
    """Slows down saves that are started from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[int] = []
        """Units that were waited for before they were read, in order."""
        self.saved: list[int] = []
        """Units that it came to, in order."""
        self.held = threading.Event()
        """Set when the save has stopped for the first time."""
        self.overdue = False
        self.on_hold: Callable[[], None] = lambda: None
        """Called in the save's thread whenever it stops."""
        self._free = False
        self._changed = threading.Condition()
        self._asked: list[Transfer] = []
        self._awaited: list[Transfer] = []
        copied, piecewise = Saving.snapshot_read, Writer.piecewise

        def watched(saving: Saving, unit: int) -> Transfer:
            transfer = copied(saving, unit)
            self._asked.append(transfer)
            return Watched(transfer, lambda: self._note(unit, transfer))

        def slowly(writer: Writer, file: str, specs: Mapping[str, Spec]) -> PiecewiseFile:
            is_new = not (writer.folder / file).exists()
            if is_new and threading.current_thread().name == "infinity-save" and file.startswith("unit-"):
                self.saved.append(int(file[5:10]))
                self._hold()
            return piecewise(writer, file, specs)

        monkeypatch.setattr(Saving, "snapshot_read", watched)
        monkeypatch.setattr(Writer, "piecewise", slowly)

    def free(self) -> None:
        """End the pauses."""
        with self._changed:
            self._free = True
            self._changed.notify_all()

    def _note(self, unit: int, transfer: Transfer) -> None:
        with self._changed:
            self.waited.append(unit)
            self._awaited.append(transfer)
            self._changed.notify_all()

    def _hold(self) -> None:
        with self._changed:
            self.held.set()
            self.on_hold()
            if not self._changed.wait_for(self._goes_on, PATIENCE):
                self.overdue = True

    def _goes_on(self) -> bool:
        awaited = any(not transfer.done() for transfer in self._awaited)
        return self._free or awaited or all(transfer.done() for transfer in self._asked)
