"""Counts the floating-point operations of one forward by module, with torch's FlopCounterMode.

It counts matrix products, convolutions and attention (`torch.utils.flop_counter`); an addition and a multiplication are
two operations.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.sizes import show_count, show_flops

_T = TypeVar("_T")


@dataclass(frozen=True)
class FlopCount:
    """Operations of one forward of `model`."""

    model: nn.Module
    total: int
    by_module: dict[str, int]
    """Name of each module with operations, "" for the root → its operations, those of its children included."""
    seconds: float
    """Duration of the forward, counting included."""

    def summary(self) -> str:
        """Return one line: operations, parameters, seconds and the rate, which counting lowers."""
        return (
            f"{show_flops(self.total)} in the forward of one micro-batch on one rank, for "
            f"{show_count(_size(self.model))} parameters; {self.seconds:.3g} s with counting, so at least "
            f"{show_flops(self.total / self.seconds)}/s"
        )

    def largest(self, depth: int, top: int) -> Iterator[str]:
        """Yield a line for each depth of the module tree: the `top` classes with the most operations.

        depth: the largest depth; -1: all depths.
        """
        kinds: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, flops in self.by_module.items():
            kinds[_depth(name)][type(modules[name]).__name__] += flops
        for level in sorted(kinds):
            if depth < 0 or level <= depth:
                most = sorted(kinds[level].items(), key=lambda item: -item[1])[:top]
                yield f"depth {level}: " + ", ".join(f"{kind} {show_flops(flops)}" for kind, flops in most)

    def tree(self) -> Iterator[str]:
        """Yield a line for each module with operations, in the order of the model."""
        for name, module in self.model.named_modules(remove_duplicate=False):
            if name in self.by_module:
                flops = self.by_module[name]
                title = f"{'  ' * _depth(name)}{name or 'the model'} ({type(module).__name__})"
                share = 100 * flops / self.total
                yield f"{title}: {show_count(_size(module))} parameters, {show_flops(flops)}, {share:.1f} %"


def count_flops(model: nn.Module, call: Callable[[], _T], device: torch.device) -> tuple[_T, FlopCount]:
    """Run `call`, a forward of `model`, and return its result and its operations.

    Waits for `device` before and after.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        result = call()
    wait()
    seconds = time.perf_counter() - began
    root = type(model).__name__
    names = {root: "", **{f"{root}.{name}": name for name, _ in model.named_modules(remove_duplicate=False) if name}}
    counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
    by_module = {names[name]: sum(by_operation.values()) for name, by_operation in counts.items() if name in names}
    return result, FlopCount(model, counter.get_total_flops(), by_module, seconds)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
