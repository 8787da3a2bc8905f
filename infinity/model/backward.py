"""Detects where a backward of the model begins and ends, for any caller and any depth of nesting.

autograd runs a backward as a graph task. A reentrant checkpoint runs a task inside another one; gradients that arrive
there belong to the outermost task. The tracker sees a task when autograd unpacks a saved tensor or a gradient arrives,
and queues a callback for its end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from infinity.interrupts import uninterrupted
from infinity.units.compiled import eager, refuse_compiled_autograd


class Engine(Protocol):
    """The engine, as the hooks of its model see it (`infinity.engine.base`)."""

    def _on_entry(self) -> None:
        """An outermost forward of any module that holds units begins, outside of any backward."""

    def _on_forward(self, arguments: object) -> None:
        """An outermost forward of the root begins, outside of any backward. arguments: (args, kwargs)."""

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in place of `call`, a forward of the root."""

    def _on_backward(self) -> None:
        """A backward starts."""

    def _on_backward_end(self) -> None:
        """The outermost task of a backward succeeds. Called in its thread."""


class BackwardTracker:
    """Tracks the backward passes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.running = False
        """True if a backward has begun and its end has not been seen."""
        self._engine = engine
        self._tasks: set[int] = set()
        """Ids of graph tasks with a callback queued."""
        self._ended_inside = False
        """True if a task succeeded inside another task, which the tracker has not seen yet."""

    def notice(self) -> None:
        """Register the active graph task, if any, as part of a backward of the model.

        Raises UsageError under compiled autograd, which runs no callback when a backward ends.
        """
        task = torch._C._current_graph_task_id()
        # The usual call: most saved tensors belong to a task that is known.
        if task in self._tasks:
            return
        refuse_compiled_autograd()
        if task == -1:
            return
        if not self.running:
            self.running = True
            self._engine._on_backward()
        self._tasks.add(task)
        self._ended_inside = False
        Variable._execution_engine.queue_callback(partial(self._task_ended, task))

    @eager
    def _task_ended(self, task: int) -> None:
        # Later tasks ran inside this one. A checkpoint ends them by an exception once it has recomputed enough.
        self._tasks = {other for other in self._tasks if other < task}
        if not self._tasks:
            # A checkpoint's task ends inside of the outermost one, which continues [Note: where a backward ends].
            if _is_nested():
                self._ended_inside = True
            else:
                self._end()

    @uninterrupted()  # a backward that ended counts as a micro-batch, whenever Ctrl-C arrives
    def _end(self) -> None:
        self._engine._on_backward_end()  # if it raises, `conclude` returns True
        self.running = self._ended_inside = False

    def run_empty(self) -> None:
        """Begin and end a backward in which no gradient arrives."""
        self._engine._on_backward()
        self._end()

    def is_running(self, task: int) -> bool:
        """Return whether the graph task of this id is known and has not ended. Tasks inside of another one that an
        exception ended count as running until that one ends.
        """
        return task in self._tasks

    def conclude(self) -> bool:
        """End a backward whose end was not seen. Call outside of any graph task.

        Returns True if an exception cut it short; call `reset` then.
        """
        if self.running and self._ended_inside and not self._tasks:
            self._end()
        return self.running

    def reset(self) -> None:
        """Discard the state of a backward that an exception cut short."""
        self.running = self._ended_inside = False
        self._tasks.clear()


def works_for(thread: int) -> bool:
    """Return whether the calling thread is autograd's for a device and executes a backward that `thread` called.

    thread: its identifier. PyTorch does not expose which thread called a backward, so this is inferred: `thread` waits
    in one, and the calling thread has a graph task and was not started by Python.
    """
    if torch._C._current_graph_task_id() == -1 or not _is_autograds():
        return False
    return _backwards(sys._current_frames().get(thread)) > 0


def _is_nested() -> bool:
    """True if the graph task that is ending runs inside another one.

    Each task has a frame of `_engine_run_backward` on its thread's stack. In autograd's device threads the frame of the
    outermost task is missing, since it is on the caller's stack.
    """
    return _backwards(sys._getframe()) > (0 if _is_autograds() else 1)


def _is_autograds() -> bool:
    """Return whether the calling thread is one that autograd started for a device, not Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _backwards(frame: FrameType | None) -> int:
    """Return the number of backward passes on a stack."""
    depth = 0
    while frame is not None:
        depth += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return depth
