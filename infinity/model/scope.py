"""Scope of the model's code. Inside, autograd saves references, and resident parameters have their own type.

Outside, every parameter has the type that fetches its unit for each operation (`infinity.units.released`), and each
such operation opens a scope. So autograd never saves a parameter itself, whose memory is reused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from infinity.errors import UsageError
from infinity.model.backward import works_for
from infinity.model.saved import SavedTensors
from infinity.units import binding


class Scope:
    """The scope of one engine. Any thread may enter it, one at a time. saved: the hooks to install in it."""

    def __init__(self, saved: SavedTensors, resident: binding.ResidentUnits) -> None:
        self.depth = 0
        """Number of scopes entered and not left; scopes nest."""
        self.saved = saved
        self._resident = resident
        self._thread = 0
        self._autocast_cache = True

    def enter(self, on_first: Callable[[], None] | None = None) -> bool:
        """Enter a scope. Returns the argument for `leave`.

        on_first: called if no scope is open, before anything is changed. Raises UsageError if another thread is inside.
        """
        thread = threading.get_ident()
        if self.depth == 0:
            if on_first is not None:
                on_first()
            self._thread = thread
            self._autocast_cache = torch.is_autocast_cache_enabled()
            self._resident.open()
        elif thread != self._thread and not works_for(self._thread):
            raise UsageError(
                "the model is running in another thread: an engine's model, backward and step run in any thread, but "
                "in one at a time. Guard them with a lock."
            )
        # In a backward: registers the task that runs a checkpoint's recomputation. The task of a backward nested in the
        # recomputation would not show where the outermost backward ends. Outside of backward: the outermost scope
        # checks for compiled autograd, which takes a few microseconds.
        if self.depth == 0 or torch._C._current_graph_task_id() != -1:
            self.saved.backward.notice()
        installed = self.saved.install()
        # Autocast caches casts of leaf parameters until its context ends: they would fill memory and be stale after an
        # update. Disabled at each entry, since a context that the model enters may enable the cache again.
        torch.set_autocast_cache_enabled(False)
        self.depth += 1
        return installed

    def leave(self, installed: bool) -> None:
        self.depth -= 1
        if installed:
            self.saved.uninstall()
        if self.depth == 0:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            self._resident.close()

    def hand_over(self) -> None:
        """Let the calling thread use an open scope in place of the one that does. That one has to wait meanwhile."""
        self._thread = threading.get_ident()
