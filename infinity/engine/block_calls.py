"""Finds the sequence of blocks that a model's forward calls, by recording a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.nn.pieces import Tiled

Call = Callable[..., Any]


@contextmanager
def calling(module: nn.Module, around: Callable[[Call], Call]) -> Iterator[None]:
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


class BlockCalls:
    """Records the calls of blocks, the children of `nn.ModuleList` and `nn.Sequential`, in a step."""

    def __init__(self, model: nn.Module) -> None:
        tiles = {child for module in model.modules() if isinstance(module, Tiled) for child in module.children()}
        self._lists = [
            list(module.children())
            for module in model.modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and module not in tiles
        ]
        blocks = dict.fromkeys(block for blocks in self._lists for block in blocks)
        self.numbers = {block: number for number, block in enumerate(blocks)}
        self._present: list[nn.Module] = []
        self._calls: list[list[nn.Module]] = []
        self._edited: set[nn.Module] = set()
        self.differentiated = False
        """True if a gradient was computed inside of a forward."""
        self._undo = ExitStack()

    def __enter__(self) -> None:
        for block in self.numbers:
            self._undo.enter_context(calling(block, partial(self._recording, block)))

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _recording(self, block: nn.Module, call: Call) -> Call:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:
                return call(*args, **kwargs)
            self._present.append(block)
            taken = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            versions = [value._version for value in taken if not value.is_inference()]
            for value in taken:
                if value.grad_fn is not None and torch.is_grad_enabled():
                    value.register_hook(partial(self._differentiated, len(self._calls)))
            output = call(*args, **kwargs)
            if versions != [value._version for value in taken if not value.is_inference()]:
                self._edited.add(block)
            return output

        return forward

    def _differentiated(self, micro_batch: int, _: torch.Tensor) -> None:
        self.differentiated = self.differentiated or micro_batch == len(self._calls)

    def end(self) -> None:
        """End the forward of a micro-batch."""
        self._calls.append(self._present)
        self._present = []

    def sequence(self) -> list[nn.Module] | None:
        """Return the list with the most parameters of which each block was called once a micro-batch, in one order."""
        best: tuple[int, list[nn.Module] | None] = 0, None
        for blocks in self._lists:
            members = set(blocks)
            orders = [[block for block in calls if block in members] for calls in self._calls]
            size = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(orders[0]) != len(members) or set(orders[0]) != members or self._edited & members:
                continue
            if all(order == orders[0] for order in orders) and size > best[0]:
                best = size, orders[0]
        return best[1]
