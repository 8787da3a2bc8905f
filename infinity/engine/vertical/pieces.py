"""Cuts the graph of a micro-batch between blocks, so that backward runs piece by piece.

A block's inputs are replaced by tensors of the same memory which begin a graph of their own. The gradient that arrives
there is kept, and a backward of the previous piece starts from it. Neither end keeps the memory of the cut tensor.

A function that runs in a thread of its own, but only while its caller waits for it.

A module's forward is an ordinary function, which Python cannot suspend: generators suspend their own frame only, not
those that they call. A thread keeps its stack while it waits, so a forward can pause inside of any calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from infinity import concurrency
from infinity.errors import ModelError
from infinity.interrupts import uninterrupted

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_REENTRANT = "CheckpointFunctionBackward"

anchor = torch.zeros((), requires_grad=True)
"""Gives graphs that begin at a cut a leaf. Its gradient is never computed."""


class _Count(torch.autograd.Function):
    """Reports the number of its backward pass."""

    number = -1

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        _Count.number = torch._C._current_graph_task_id()


_count: torch.Tensor = _Count.apply(anchor)  # type: ignore[no-untyped-call]
_one = torch.ones(())


def backward_passes() -> int:
    """Return the number of backward passes that this process has started before, calls of this included.

    Gradients that a forward computes behind a cut run none of its nodes, so that no hook could see them.
    """
    torch.autograd.backward(_count, _one, retain_graph=True)
    return _Count.number


def refused(reason: str) -> ModelError:
    """Return the error for a model that does not keep what `blocks` promises."""
    return ModelError(
        f"engine.train_batch(blocks=...): {reason}. Nothing was updated. Pass other blocks, or none: the micro-batches "
        "then run one after the other."
    )


class _Cut:
    """The gradient that arrived at a cut tensor, until the backward of the previous piece takes it."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None


class _Begin(torch.autograd.Function):
    """Begins a graph at values."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.cut.gradient = gradient
        return None, None, None


class _End(torch.autograd.Function):
    """Ends a graph at a tensor, with a scalar whose backward starts from the kept gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.cut = cut
        return tensor.new_zeros((), dtype=torch.float32)  # a complex scalar starts no backward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        kept, ctx.cut.gradient = ctx.cut.gradient, None
        return kept, None


class Boundary:
    """The cut in front of a block, or after the last one, in one micro-batch."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[_Cut, torch.Tensor]] = {}

    def cut(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values with all tensors that require a gradient replaced."""
        begun: dict[int, torch.Tensor] = {}

        def begin(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            if type(value) is not torch.Tensor or value.__dict__:
                raise refused("a block takes a tensor of a subclass or with attributes")
            if id(value) not in begun:
                cut = _Cut()
                self._ends[len(self._ends)] = cut, _End.apply(value, cut)  # type: ignore[no-untyped-call]
                begun[id(value)] = _Begin.apply(anchor, value.detach(), cut)  # type: ignore[no-untyped-call]
            return begun[id(value)]

        return {name: begin(value) for name, value in values.items()}

    @property
    def roots(self) -> list[torch.Tensor]:
        """The scalars from which the backward of the previous piece starts."""
        return [end for _, end in self._ends.values()]

    def run(self) -> None:
        """Run the backward of the previous piece, for the tensors that received a gradient."""
        roots = [end for cut, end in self._ends.values() if cut.gradient is not None]
        self._ends = {}
        if roots:
            torch.autograd.backward(roots)


class Graph:
    """The graph of one micro-batch in pieces. Piece 0 starts from the loss.

    Raises ModelError if a gradient passes from one piece to another beside a cut.
    """

    def __init__(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """pieces: roots of each piece, in the order of backward."""
        self.leaves: dict[int, torch.Tensor] = {}
        """id → leaf."""
        self.edges: dict[int, Counter[int]] = defaultdict(Counter)
        """id of a leaf → piece → number of edges from the piece to the leaf."""
        self._piece_of: dict[Node, int] = {}
        for piece, roots in enumerate(pieces):
            for root in roots:
                if root.grad_fn is not None:
                    self._walk(root.grad_fn, piece)
        self._piece_of.clear()

    def _walk(self, root: Node, piece: int) -> None:
        pending = [root]
        self._piece_of[root] = piece
        while pending:
            for node, _ in pending.pop().next_functions:
                if node is None:
                    continue
                if node.name() == _ACCUMULATE:
                    leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
                    if leaf is not anchor:
                        self.leaves[id(leaf)] = leaf
                        self.edges[id(leaf)][piece] += 1
                    continue
                known = self._piece_of.setdefault(node, -1)
                if known < 0:
                    if node.name() == _REENTRANT:
                        raise refused("it has reentrant checkpoints: pass use_reentrant=False to checkpoint()")
                    self._piece_of[node] = piece
                    pending.append(node)
                elif known != piece:
                    raise refused(
                        "a gradient reaches a block by another way than the next block, such as a skip connection"
                    )


class Cancelled(BaseException):
    """Ends a coroutine at its pause. Not an Exception, which the model's code may catch."""


class Coroutine:
    """Runs `body` in turns with the caller. It inherits the caller's context variables and primitives
    (`infinity.concurrency`), but nothing else that is thread-local.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Callable[[], None] | None = body
        self._primitives = concurrency.present()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._is_started = self._is_ended = False
        self._before, self._context = contextvars.copy_context(), contextvars.copy_context()
        # The model's code runs in it, so its name is none of the engine's own threads (`infinity.observe.recorder`).
        self._thread = threading.Thread(target=self._context.run, args=(self._run,), name="micro-batch", daemon=True)

    @property
    def has_set_context(self) -> bool:
        """Return whether the body has set context variables, which its caller does not see."""
        values = self._before
        return len(values) != len(self._context) or any(values.get(v) is not x for v, x in self._context.items())

    @property
    def has_ended(self) -> bool:
        """Return whether the body has ended. Then it cannot be resumed."""
        return self._is_ended

    @uninterrupted()  # Ctrl-C is for the caller, and the body may be moving states
    def resume(self) -> None:
        """Run the body until its next `pause` or its end. Raises its exception."""
        if self._is_started:
            self._turn.release()
        else:
            self._is_started = True
            self._thread.start()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def pause(self) -> None:
        """Return to the caller until the next `resume`. Call it in the body's thread."""
        self._back.release()
        self._turn.acquire()
        if self._is_cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Raise `Cancelled` in the body, and wait for its end. Errors that it raises meanwhile are dropped."""
        self._is_cancelled = True
        while self._is_started and not self._is_ended:
            self._turn.release()
            self._back.acquire()
        self._error = None

    def _run(self) -> None:
        body, self._body = self._body, None  # which may refer to this object
        assert body is not None
        try:
            with concurrency.using(self._primitives):
                body()
        except Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
        finally:
            self._is_ended = True
            self._back.release()
