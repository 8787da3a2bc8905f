"""Finds where a backward of the model begins and ends, whoever calls it and however deep it is nested.

autograd runs a backward as a graph task. A reentrant checkpoint runs a task of its own inside another one's; gradients
that arrive there belong to the outermost. A task is noticed when autograd asks for a saved tensor or a gradient
arrives, and asked to call back when it ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from infinity.units.compiled import eager


class BackwardTracker:
    """Follows the backwards of one engine."""

    def __init__(self) -> None:
        self.running = False
        """Whether a backward has begun and is not known to have ended."""
        self._on_begin: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._tasks: set[int] = set()
        """Graph tasks that will call back."""
        self._ended_inside = False
        """A task ended well, inside of one that has not been noticed."""

    def report_to(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        """on_begin: a backward has begun. on_end: its outermost task has ended well. In the thread that runs it."""
        self._on_begin, self._on_end = on_begin, on_end

    def notice(self) -> None:
        """Something of the model's backward happens. Does nothing outside of a graph task."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks or task == -1:
            return
        if not self.running:
            assert self._on_begin is not None
            self.running = True
            self._on_begin()
        self._tasks.add(task)
        self._ended_inside = False
        Variable._execution_engine.queue_callback(partial(self._task_ended, task))

    @eager
    def _task_ended(self, task: int) -> None:
        # Later ones ran inside of it. A checkpoint that has computed again what it needs ends them by an exception.
        self._tasks = {other for other in self._tasks if other < task}
        if not self._tasks:
            if _is_nested():
                self._ended_inside = True
            else:
                self._end()

    def _end(self) -> None:
        assert self._on_end is not None
        self.running = self._ended_inside = False
        self._on_end()

    def conclude(self) -> bool:
        """To be called outside of any graph task. A backward that is still running then is over: it ended without
        being noticed again, or an exception cut it short. Returns whether it was cut short; `reset` forgets it.
        """
        if self.running and self._ended_inside and not self._tasks:
            self._end()
        return self.running

    def reset(self) -> None:
        """Forget a backward that was cut short."""
        self.running = self._ended_inside = False
        self._tasks.clear()


def _is_nested() -> bool:
    """Whether the graph task that is ending runs inside of another one.

    Every backward starts in one function of torch's. Threads of autograd's own, which compute on devices, do not have
    the outermost one's on their stack.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    own = isinstance(threading.current_thread(), threading._DummyThread)
    return depth > (0 if own else 1)
