"""Cuts the graph of a micro-batch between blocks, so that backward runs piece by piece.

A block's inputs are replaced by tensors of the same memory which begin a graph of their own. The gradient that arrives
there is kept, and a backward of the previous piece starts from it. Neither end keeps the memory of the cut tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from infinity.errors import ModelError

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
