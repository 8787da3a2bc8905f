"""Finds the gradients that a backward still delivers, from the graphs that it executes.

autograd fixes the leaves of a graph when it starts it, and reaches each of them once. Nothing here follows from an
earlier step, so a model may train other parameters in each.

A reentrant checkpoint runs its forward without a graph, and again in backward, as a graph of its own inside of the
first. No graph contains its gradients before it has run again, so uses without a graph are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_iter

from infinity.model.backward import BackwardTracker
from infinity.units.compiled import outside_modes
from infinity.units.unit import Unit


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
            for ended in [other for other in of_unit if not self._backward.is_running(other)]:
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
