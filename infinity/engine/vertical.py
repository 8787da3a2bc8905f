"""Vertical accumulation: a step's micro-batches pass a sequence of blocks together, one block after the other.

The forward of each micro-batch is a coroutine that pauses in front of each block. So a block's parameters are fetched
once for all micro-batches. Backward runs piece by piece in the reverse order (`infinity.engine.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from infinity.engine.block_calls import calling
from infinity.engine.coroutine import Coroutine
from infinity.engine.global_state import GlobalState
from infinity.engine.loss_check import check_scalar
from infinity.engine.model_state import ModelState
from infinity.engine.parts import EngineParts
from infinity.engine.pieces import Boundary, Graph, NotInPieces, backward_passes
from infinity.grads.held import HeldGradients
from infinity.model.topmost import topmost_hooks
from infinity.tiers.device import Device
from infinity.units import residents

LossOf = Callable[[Any], torch.Tensor]
"""Batch → its loss, by a forward of the model."""


class Forward:
    """The forward of one micro-batch, which pauses in front of each block."""

    def __init__(self, batch: Any, loss_of: LossOf, parts: EngineParts) -> None:
        self.boundaries: list[Boundary] = []
        """The cuts in front of the blocks called so far, in the order of calls."""
        self.loss: torch.Tensor | None = None
        self._batch = batch
        self._loss_of = loss_of
        self._as_caller = parts.device.like_this_thread()
        self._scope = parts.runner.scope
        self._coroutine = Coroutine(self._run)

    def _run(self) -> None:
        with self._as_caller:
            self._scope.hand_over()
            self.loss = self._loss_of(self._batch)

    def advance(self) -> None:
        """Run to the next block, or to the end."""
        try:
            self._coroutine.resume()
        finally:
            self._scope.hand_over()

    def cancel(self) -> None:
        """End the forward, and drop its graph."""
        try:
            self._coroutine.cancel()
        finally:
            self._scope.hand_over()
            self.boundaries, self.loss = [], None

    def pause(self, block: int, values: dict[Any, Any]) -> dict[Any, Any]:
        """Pause in front of block number `block`. Returns `values`, those that it takes, cut from the graph so far."""
        if block != len(self.boundaries):
            raise NotInPieces("the model calls its blocks in different orders")
        boundary = Boundary()
        if torch.is_grad_enabled():
            if any(isinstance(value, torch.Tensor) and residents.behind(value) for value in values.values()):
                raise NotInPieces("a block takes a parameter as its argument")
            values = boundary.cut(values)
        self.boundaries.append(boundary)
        self._coroutine.pause()
        self._scope.hand_over()
        return values

    @property
    def has_set_context(self) -> bool:
        """Return whether the forward has ended with other context variables, which the next one would inherit."""
        return self.loss is not None and self._coroutine.has_set_context

    @property
    def pieces(self) -> list[Sequence[torch.Tensor]]:
        """The roots of the pieces of backward, in its order."""
        assert self.loss is not None
        return [[self.loss], *(boundary.roots for boundary in reversed(self.boundaries))]


class VerticalOrder:
    """Runs steps of one model block by block."""

    def __init__(self, blocks: Sequence[nn.Module], parts: EngineParts) -> None:
        """blocks: in the order in which each forward calls them."""
        self._blocks = blocks
        self._parts = parts
        self._running: Forward | None = None
        self._has_run = False

    def forward(self, batches: Sequence[Any], loss_of: LossOf, state: ModelState) -> list[Forward]:
        """Run the forwards of all micro-batches. Raises NotInPieces if the model does not fit, and UsageError for a
        loss that is no scalar with a graph, with all of them ended.

        state: that of the model before. Call it in an open scope of the store.
        """
        forwards = [Forward(batch, loss_of, self._parts) for batch in batches]
        passes, globals_before = backward_passes(), GlobalState()
        stages = len(self._blocks) + 2  # the first ends in front of the blocks, the last follows them
        with ExitStack() as undo:
            for number, block in enumerate(self._blocks):
                undo.enter_context(calling(block, partial(self._pausing, number)))
            try:
                for stage in range(stages):
                    is_edge = not self._has_run or stage in (0, stages - 1)
                    for forward in forwards:
                        self._running = forward
                        forward.advance()
                        if (forward.loss is None) != (stage < stages - 1):
                            raise NotInPieces("the model does not call all its blocks")
                        if forward.has_set_context:
                            raise NotInPieces("the model's forward sets context variables")
                        whole = is_edge or forward is forwards[-1]
                        _check_unchanged(state, quick=not whole)
                        if globals_before.changed():
                            raise NotInPieces("the blocks run in a context, such as a setting of torch")
                if backward_passes() != passes + 1:
                    raise NotInPieces("the model's forward computes gradients")
                for forward in forwards:
                    check_scalar(forward.loss)
            except BaseException:
                for forward in forwards:
                    forward.cancel()
                globals_before.restore()  # forwards that overlap have left their contexts in another order
                raise
            finally:
                self._running = None
        self._has_run = True
        return forwards

    def _pausing(self, number: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None or torch._C._current_graph_task_id() != -1:
                return call(*args, **kwargs)
            values = running.pause(number, {**dict(enumerate(args)), **kwargs})
            args = tuple(values.pop(place) for place in range(len(args)))
            output = call(*args, **values)
            return output if number + 1 < len(self._blocks) else _pause_after(running, output)

        return forward

    def hold(self, forwards: Sequence[Forward]) -> HeldGradients:
        """Return the holder of gradients for the backward of `forwards`. Raises NotInPieces if it would change bits."""
        pieces: dict[int, set[int]] = {}
        last: dict[int, int] = {}
        outside: dict[int, set[int]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for forward in forwards:
                of_unit: dict[int, set[int]] = {}
                if not all(boundary.roots for boundary in forward.boundaries[1:-1]):
                    raise NotInPieces("the blocks take no tensor that requires a gradient")
                graph = Graph(forward.pieces)
                for key, leaf in graph.leaves.items():
                    unit = self._parts.unit_of.get(key)
                    if unit is None:
                        used = set(graph.edges[key])
                        if leaf.requires_grad and (len(used) > 1 or outside.setdefault(key, used) != used):
                            raise NotInPieces("a leaf outside of the model is used by several blocks")
                        continue
                    of_unit.setdefault(unit.index, set()).update(graph.edges[key])
                    _check_sum(leaf, sorted(graph.edges[key].items()))
                for index, numbers in of_unit.items():
                    if last.setdefault(index, max(numbers)) != max(numbers):
                        raise NotInPieces("micro-batches use parameters in different blocks")
                    pieces.setdefault(index, set()).update(numbers)
        return HeldGradients({index: sorted(numbers) for index, numbers in pieces.items()})


def backward(
    forwards: Sequence[Forward],
    losses: Sequence[torch.Tensor],
    begin: Callable[[int, int], None],
    end: Callable[[], None],
) -> None:
    """Run the backward of all micro-batches, piece by piece. losses: what each starts from. begin: called with the
    numbers of a micro-batch and of a piece, before its backward. end: called after it, even if no gradient arrived.
    """
    pending = list(losses)
    for number in range(len(forwards)):
        begin(number, 0)
        loss, pending[number] = pending[number], pending[number].detach()
        torch.autograd.backward(loss)
        del loss
        end()
    for piece in range(1, len(forwards[0].boundaries) + 1):
        for number, forward in enumerate(forwards):
            begin(number, piece)
            forward.boundaries.pop().run()
            end()


def _pause_after(forward: Forward, output: Any) -> Any:
    """Pause after the last block, so that the rest of the model is a piece of its own. Returns its output, cut."""
    number = len(forward.boundaries)
    if type(output) is tuple:
        return tuple(forward.pause(number, dict(enumerate(output))).values())
    return forward.pause(number, {0: output})[0]


def _check_unchanged(state: ModelState, *, quick: bool) -> None:
    """Raise NotInPieces if the model's state changed. quick: as in `ModelState.changed`."""
    changed = state.changed(quick=quick)
    if changed is not None:
        raise NotInPieces(f"the model's forward changes attributes (of a {changed}), which micro-batches would share")


def _check_sum(leaf: torch.Tensor, edges: Sequence[tuple[int, int]]) -> None:
    """Raise NotInPieces unless autograd sums the gradients of `leaf` in the order of pieces. edges: (piece, number)."""
    if len(edges) == 1:
        return
    if any(number > 1 for _, number in edges[1:]):
        raise NotInPieces("a parameter of several blocks is used more than once in one of them")


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_STATELESS = frozenset({"transformers.modeling_utils"})
"""Modules whose hooks on a model depend on their arguments only, as `enable_input_require_grads`."""


def hooked(model: nn.Module) -> str | None:
    """Return the name of a module or parameter with hooks that may have a state; "" for all modules, None if there are
    none.
    """
    with torch._C.DisableTorchFunctionSubclass():  # which would fetch parameters
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:  # one is the engine's
                return name
    if any(getattr(torch_module, f"_global{name}") for name in _HOOKS):
        return ""
    for name, module in model.named_modules():
        for hooks in (getattr(module, kind) for kind in _HOOKS):
            if any(getattr(hook, "__module__", None) not in _STATELESS for hook in hooks.values()):
                return str(name)
    return None


def is_plain_thread(device: Device) -> bool:
    """Return whether another thread would compute as this one does, in a context of `Device.like_this_thread`."""
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    if modes != (device.modes, device.function_modes):
        return False
    kinds = filter(torch.amp.is_autocast_available, ("cpu", device.torch_device.type))
    if any(map(torch.is_autocast_enabled, kinds)) or torch.is_inference_mode_enabled():
        return False
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return topmost_hooks(True) is None
