"""Vertical order: a step's micro-batches pass a sequence of blocks together, one block after the other.

The forward of each micro-batch is a coroutine that pauses in front of each block. So a block's parameters are fetched
once for all micro-batches. Backward runs piece by piece in the reverse order (`infinity.engine.vertical.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.engine.loss_check import check_scalar
from infinity.engine.parts import EngineParts
from infinity.engine.vertical.checks import BufferChanges
from infinity.engine.vertical.coroutine import Coroutine
from infinity.engine.vertical.pieces import Boundary, Graph, backward_passes, refused
from infinity.errors import ModelError
from infinity.grads.held import HeldGradients
from infinity.interrupts import uninterrupted
from infinity.units import residents

Call = Callable[..., Any]
LossOf = Callable[[Any], torch.Tensor]
"""Batch → its loss, by a forward of the model."""


class Forward(Coroutine):
    """The forward of one micro-batch, which pauses in front of each block."""

    def __init__(self, batch: Any, loss_of: LossOf, parts: EngineParts) -> None:
        self.boundaries: list[Boundary] = []
        """The cuts in front of the blocks called so far, in the order of calls."""
        self.loss: torch.Tensor | None = None
        self._refusal: ModelError | None = None
        """The first error of a check, which the model's code may catch."""
        self._batch = batch
        self._loss_of = loss_of
        self._as_caller = parts.device.like_this_thread()
        self._scope = parts.runner.scope
        super().__init__()

    def body(self) -> None:
        with self._as_caller:
            self._scope.hand_over()
            self.loss = self._loss_of(self._batch)

    def advance(self) -> None:
        """Run to the next block, or to the end."""
        try:
            self.resume()
        except Exception as error:
            if self._refusal is not None and error is not self._refusal:
                raise self._refusal from error  # the model's code raised another one in its place
            raise
        finally:
            self._scope.hand_over()
        if self._refusal is not None:
            raise self._refusal

    def cancel(self) -> None:
        """End the forward, and drop its graph."""
        try:
            super().cancel()
        finally:
            self._scope.hand_over()
            self.boundaries, self.loss, self._refusal = [], None, None

    def run(self, number: int, last: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a block, by `call`, after a pause in front of it. number: the block's. last: number of the last one."""
        due = len(self.boundaries)
        if number != due:
            expected = f"blocks[{due}] was due" if due <= last else "all blocks had run"
            self._refuse(f"a forward called blocks[{number}] when {expected}, and it has to call each once, in order")
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        values = self._pause(values)
        args = tuple(values.pop(place) for place in range(len(args)))
        output = call(*args, **values)
        return output if number < last else self._pause_after(output)

    def _pause_after(self, output: Any) -> Any:
        """Pause after the last block, so that the rest of the model is a piece of its own. Returns its output, cut."""
        if type(output) is tuple:
            return tuple(self._pause(dict(enumerate(output))).values())
        return self._pause({0: output})[0]

    def _pause(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Pause. Returns `values`, cut from the graph so far."""
        boundary = Boundary()
        if torch.is_grad_enabled():
            if any(isinstance(value, torch.Tensor) and residents.behind(value) for value in values.values()):
                self._refuse("a block takes a parameter as its argument")
            try:
                values = boundary.cut(values)
            except ModelError as error:
                self._refusal = error
                raise
        self.boundaries.append(boundary)
        self.pause()
        self._scope.hand_over()
        return values

    def _refuse(self, reason: str) -> NoReturn:
        self._refusal = self._refusal or refused(reason)
        raise self._refusal

    @property
    def pieces(self) -> list[Sequence[torch.Tensor]]:
        """The roots of the pieces of backward, in its order."""
        assert self.loss is not None
        return [[self.loss], *(boundary.roots for boundary in reversed(self.boundaries))]


class VerticalOrder:
    """Runs steps of `model` block by block. blocks: in the order in which each forward calls them."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], parts: EngineParts) -> None:
        self.blocks = blocks
        self._model = model
        self._parts = parts
        self._running: Forward | None = None

    def forward(self, batches: Sequence[Any], loss_of: LossOf) -> list[Forward]:
        """Run the forwards of all micro-batches, in an open scope of the runner. After an exception all are ended.

        Raises ModelError if the model does not run its blocks as declared, and UsageError for a loss that is no scalar
        with a graph.
        """
        forwards = [Forward(batch, loss_of, self._parts) for batch in batches]
        passes, last = backward_passes(), len(self.blocks) - 1
        buffers = BufferChanges(self._model)
        with ExitStack() as undo:
            for number, block in enumerate(self.blocks):
                undo.enter_context(_calling(block, partial(self._pausing, number, last)))
            try:
                for stage in range(len(self.blocks) + 2):  # the first ends in front of the blocks, the last follows
                    for forward in forwards:
                        self._running = forward
                        forward.advance()
                        self._check(forward, stage)
                    buffers.check_stage()
                if backward_passes() != passes + 1:
                    raise refused("the model's forward computes gradients, which would end at the last block it called")
                for forward in forwards:
                    check_scalar(forward.loss)
            except BaseException:
                self._running = None  # a cancelled forward may call blocks on its way out
                with uninterrupted():
                    for forward in forwards:
                        forward.cancel()
                raise
            finally:
                self._running = None
        return forwards

    def _check(self, forward: Forward, stage: int) -> None:
        """Raise ModelError unless `forward` paused where stage `stage` ends."""
        count = len(self.blocks)
        if forward.has_ended and stage <= count:
            raise refused(f"a forward ended before blocks[{min(stage, count - 1)}] had run")
        if forward.has_ended and forward.has_set_context:
            raise refused("the model's forward sets context variables, which the next micro-batch would read")

    def _pausing(self, number: int, last: int, call: Call) -> Call:
        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None or torch._C._current_graph_task_id() != -1:
                return call(*args, **kwargs)
            return running.run(number, last, call, args, kwargs)

        return forward

    def hold(self, forwards: Sequence[Forward]) -> HeldGradients:
        """Return the holder of gradients for the backward of `forwards`. Raises ModelError if it would change bits."""
        pieces: dict[int, set[int]] = {}
        last: dict[int, int] = {}
        outside: dict[int, set[int]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for forward in forwards:
                of_unit: dict[int, set[int]] = {}
                if not all(boundary.roots for boundary in forward.boundaries[1:-1]):
                    raise refused(
                        "a block takes no tensor that requires a gradient: leave frozen blocks in front out, and call "
                        "checkpoint() with use_reentrant=False"
                    )
                graph = Graph(forward.pieces)
                for key, leaf in graph.leaves.items():
                    unit = self._parts.unit_of.get(key)
                    if unit is None:
                        used = set(graph.edges[key])
                        if leaf.requires_grad and (len(used) > 1 or outside.setdefault(key, used) != used):
                            raise refused("a leaf outside of the model is used by several blocks")
                        continue
                    of_unit.setdefault(unit.index, set()).update(graph.edges[key])
                    if any(count > 1 for _, count in sorted(graph.edges[key].items())[1:]):
                        # Autograd would not sum the leaf's gradients in the order of pieces.
                        raise refused("a parameter of several blocks is used more than once in one of them")
                for index, numbers in of_unit.items():
                    if last.setdefault(index, max(numbers)) != max(numbers):
                        raise refused("micro-batches use parameters in different blocks")
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


@contextmanager
def _calling(module: nn.Module, around: Callable[[Call], Call]) -> Iterator[None]:
    """Replace the forward of `module` by `around(forward)` in the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = around(module.forward)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
