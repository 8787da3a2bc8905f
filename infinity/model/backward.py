"""A backward as autograd runs it: where it begins and ends, and which gradients it still delivers.

autograd runs a backward as a graph task, for any caller and any depth of nesting. A reentrant checkpoint runs a task
inside another one; gradients that arrive there belong to the outermost task. The tracker sees a task when autograd
unpacks a saved tensor or a gradient arrives, and queues a callback for its end.

autograd fixes the leaves of a graph when it starts it, and reaches each of them once. Nothing here follows from an
earlier step, so a model may train other parameters in each. A reentrant checkpoint runs its forward without a graph,
and again in backward, as a graph of its own inside of the first. No graph contains its gradients before it has run
again, so uses without a graph are counted.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_iter

from infinity.interrupts import uninterrupted
from infinity.units.compiled import eager, outside_modes, refuse_compiled_autograd
from infinity.units.unit import Unit


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


@dataclass(slots=True)
class _InTask:
    """The gradients of one unit in one graph task."""

    arrived: set[int] = field(default_factory=set)
    """Slots whose gradient has arrived."""
    coming: set[int] | None = None
    """Slots whose gradient has not arrived and is in the task's graph; None: the graph was not queried."""

    def query(self, unit: Unit) -> None:
        """Query the graph of the present task, which is that of these gradients, for those of `unit` to come. Once."""
        if self.coming is None:
            self.coming = _in_graph(unit, self.arrived)


class ComingGradients:
    """The gradients of one engine's units that the running backward still delivers."""

    def __init__(self, backward: BackwardTracker) -> None:
        self._backward = backward
        self._tasks: dict[int, dict[int, _InTask]] = {}
        """unit → graph task → its gradients."""
        self._without_graph: Counter[int] = Counter()
        """unit → forwards of its modules without a graph that have not been run again."""
        self._counts = True
        """True if forwards without a graph are counted."""

    # -- events ------------------------------------------------------------------------------------------------------

    def ran(self, unit: Unit) -> None:
        """Register that a module with parameters in `unit` runs."""
        if not torch.is_grad_enabled():
            if self._counts:
                self._without_graph[unit.index] += 1
        elif self._without_graph and unit.index in self._without_graph and torch._C._current_graph_task_id() != -1:
            self._ran_again(unit)

    def _ran_again(self, unit: Unit) -> None:
        left = self._without_graph[unit.index] - 1
        if left:
            self._without_graph[unit.index] = left
        else:
            del self._without_graph[unit.index]
        # The gradients of this forward arrive in a task inside of the present one, where its graph cannot be queried.
        task = torch._C._current_graph_task_id()
        self._tasks.setdefault(unit.index, {}).setdefault(task, _InTask()).query(unit)

    def begin_forward(self, arguments: object) -> None:
        """Register an outermost forward of the model outside of backward. One without a graph, of `arguments` that
        require no gradient, is never run again: a checkpoint would pass on no gradient.
        """
        self._counts = torch.is_grad_enabled() or any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_iter(arguments)
        )

    def end_forward(self) -> None:
        """Register the end of an outermost forward of the model."""
        self._counts = True

    def arrived(self, unit: Unit, slot: int) -> None:
        """Register a gradient that has arrived in the present graph task."""
        of_unit = self._tasks.setdefault(unit.index, {})
        task = torch._C._current_graph_task_id()
        gradients = of_unit.get(task)
        if gradients is None:
            for ended in [other for other in of_unit if not self._backward.is_running(other)] if of_unit else ():
                del of_unit[ended]
            gradients = of_unit[task] = _InTask()
        gradients.arrived.add(slot)
        # The graph is asked once; afterwards each arrival takes itself off the list.
        if gradients.coming is not None:
            gradients.coming.discard(slot)

    def end_backward(self, *, last: bool) -> None:
        """Register the end of the outermost graph task, or of the step. last: the step's last backward has ended, so no
        forward is run again.
        """
        self._tasks.clear()
        if last:
            self._without_graph.clear()

    # -- queries -----------------------------------------------------------------------------------------------------

    def expects(self, unit: Unit) -> bool:
        """Return whether the running backward may deliver another gradient of `unit`.

        True in doubt: for a gradient in the graph that turns out to be undefined, and for a unit that ran without a
        graph and was not run again.
        """
        # A checkpoint will run the block again, with gradients that no graph shows yet [Note: when a gradient is
        # complete].
        if unit.index in self._without_graph:
            return True
        task = torch._C._current_graph_task_id()
        of_unit = self._tasks.setdefault(unit.index, {})
        present = of_unit.setdefault(task, _InTask())
        if len(of_unit) == 1:  # the usual case: no task runs inside of another
            return self._backward.is_running(task) and self._is_expected(unit, present, True)
        return any(
            self._is_expected(unit, gradients, gradients is present)
            for other, gradients in of_unit.items()
            if self._backward.is_running(other)
        )

    def reaches(self, unit: Unit) -> bool:
        """Return whether the present graph task has a gradient for any parameter of `unit`."""
        return bool(_in_graph(unit))

    def _is_expected(self, unit: Unit, gradients: _InTask, is_present: bool) -> bool:
        if gradients.coming is None:
            if len(gradients.arrived) == len(unit.parameters):
                return False
            # The graph of another task cannot be asked from here, so the answer is the safe one.
            if not is_present:
                return True
            gradients.query(unit)
        return bool(gradients.coming)


def _in_graph(unit: Unit, arrived: Collection[int] = ()) -> set[int]:
    """Return the slots of `unit`, except those in `arrived`, whose gradient is in the graph of the present task."""
    with outside_modes(), torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return {
            slot
            for slot, parameter in enumerate(unit.parameters)
            if slot not in arrived and parameter.requires_grad and _is_in_graph(parameter)
        }


def _is_in_graph(parameter: torch.Tensor) -> bool:
    """Return whether the present graph task executes the node that accumulates the gradient of `parameter`."""
    # The node lives as long as a graph does that leads to it. A view is how PyTorch finds it (`get_gradient_edge`).
    view = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]
    assert node is not None
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch.autograd.grad returns this gradient and accumulates none
