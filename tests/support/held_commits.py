"""Commits of a durable run that are as late as can be: each stops before it writes through, until somebody waits for
it. A step that does not wait for a commit meets one that is not done, whatever the machine's speed.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infinity.durable.commits import Commits, Committing, Step

PATIENCE = 20.0
"""Seconds after which a commit goes on all the same; tests fail then, as nothing waited."""


class HeldCommits:
    """Holds commits that are started from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overdue = False
        """True once a commit went on without a wait."""
        self._awaited: dict[int, threading.Event] = {}
        """Step → event that is set by the first wait for its commit."""
        self._free = False
        begin, wait, write_through = Committing.__init__, Committing.wait, Commits._write_through
        steps: dict[int, Step] = {}

        def begun(committing: Committing, step: Step) -> None:
            begin(committing, step)
            steps[id(committing)] = step
            self._awaited[id(step)] = threading.Event()
            if self._free:
                self._awaited[id(step)].set()

        def waits(committing: Committing) -> None:
            self._awaited[id(steps[id(committing)])].set()
            wait(committing)

        def late(commits: Commits, step: Step, **options: Any) -> None:
            if not self._awaited[id(step)].wait(PATIENCE):
                self.overdue = True
            write_through(commits, step, **options)

        monkeypatch.setattr(Committing, "__init__", begun)
        monkeypatch.setattr(Committing, "wait", waits)
        monkeypatch.setattr(Commits, "_write_through", late)

    def free(self) -> None:
        """Hold no commit from now on."""
        self._free = True
        for event in list(self._awaited.values()):
            event.set()
