"""The time of a model's operations and of the engine's kernels, measured on this machine.

Each is executed on tensors of its shapes. Operands are evicted from the caches, as weights and saved activations are
when a step uses them, and results are new memory. The values are made up: small numbers, and indices below the size of
every operand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.tiers.available import available_memory, cache_bytes
from infinity.units.compiled import outside_modes

PART_OF_MEMORY = 4
"""Divisor of the free memory. An operation whose operands and results take a larger part is not executed."""
LONGEST = 1.0
"""Seconds. An operation that is expected to take longer is not executed."""
ALL = 30.0
"""Seconds of all calls after which no further operation is executed, which bounds the time of a plan."""
_REPETITIONS = 5
_BUDGET = 0.2
"""Seconds after which an operation is not repeated."""
_PATTERN = 1 << 12
"""Period of the values of an operand, in elements."""
_TIMES_CACHES = 2
_ERRORS = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
"""Errors of operations that reject the made-up values, or the host."""


class MeasuredTimes:
    """Times of calls on the host (`infinity.sim.device.Times`). Each call is measured once, with torch's threads.

    One instance can serve several simulations.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, memory: int | None = None) -> None:
        """memory: bytes that are free; by default those that are free when an operation is executed."""
        self._now = now
        self._memory = memory
        self._known: dict[Hashable, float | None] = {}
        self._spent = 0.0
        """Seconds of all calls."""
        self._evicting: torch.Tensor | None = None

    def seconds(
        self, key: Hashable, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, expected: float
    ) -> float | None:
        """Return the median seconds of a call; None if it cannot be executed here."""
        if key not in self._known:
            with outside_modes():
                self._known[key] = self._measured(function, args, kwargs, result, expected)
        return self._known[key]

    def _measured(self, function: Any, args: Any, kwargs: Any, result: Any, expected: float) -> float | None:
        free = available_memory() if self._memory is None else self._memory
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        nbytes = sum(_extent(each) * each.itemsize for each in (*operands, *results))
        if expected > LONGEST or self._spent > ALL or nbytes > free // PART_OF_MEMORY:
            return None
        # The meta device gives a layer norm's statistics in fp32, which are in the input's dtype on the host.
        for dtype in (None, *dict.fromkeys(each.dtype for each in operands[:1] if each.is_floating_point())):
            try:
                real_args, real_kwargs = _on_host((args, kwargs), _limit(function, args, operands), dtype)
                return median(self._times(function, real_args, real_kwargs))
            except _ERRORS:
                continue
        return None

    def _times(self, function: Any, args: Any, kwargs: Any) -> Iterator[float]:
        """Yield the seconds of each repetition, at least one. A first one, which may compile, is left out."""
        changed = args[0] if _changes_first(function) else None
        began = self._now()
        for number in range(1 + _REPETITIONS):
            if isinstance(changed, torch.Tensor):
                _fill(changed, 1)
            self._evict()
            start = self._now()
            function(*args, **kwargs)
            end = self._now()
            self._spent += end - start
            if number:
                yield end - start
                if end - began > _BUDGET:
                    return

    def _evict(self) -> None:
        """Empty the processors' caches of operands."""
        if self._evicting is None:
            self._evicting = torch.ones(max(1, _TIMES_CACHES * cache_bytes() // 4))
        self._evicting.sum()


def _on_host(arguments: Any, limit: int, dtype: torch.dtype | None) -> Any:
    """Return the arguments with tensors of values in place of those on the meta device. limit: of indices. dtype: of
    all floats; None: their own.
    """

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = dtype if dtype is not None and value.is_floating_point() else value.dtype
            whole = torch.empty(max(1, _extent(value)), dtype=own)
            _fill(whole, limit)
            return whole.as_strided(value.shape, value.stride())
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return tree_map(real, arguments)


def _fill(tensor: torch.Tensor, limit: int) -> None:
    """Fill a tensor with small positive numbers, of which a root exists, with integers below `limit`, or with bools."""
    if tensor.dtype == torch.bool:
        pattern = torch.arange(_PATTERN) % 2 == 0
    elif tensor.is_floating_point():
        pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).abs() * 0.02
    else:
        pattern = torch.arange(_PATTERN) * 7919 % limit  # a prime: neighbours differ
    pattern = pattern.to(tensor.dtype)
    if not tensor.is_contiguous():
        tensor.copy_(pattern[0])
        return
    flat = tensor.view(-1)
    whole = len(flat) // _PATTERN * _PATTERN
    flat[:whole].view(-1, _PATTERN).copy_(pattern)
    flat[whole:].copy_(pattern[: len(flat) - whole])


def _changes_first(function: Any) -> bool:
    """Return whether an operation of torch changes its first argument, as repetitions of `exp_` would to infinity."""
    return isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable


def _limit(function: Any, args: Any, operands: list[torch.Tensor]) -> int:
    """Return a number that no index may reach: rows of an embedding, else the least size of an operand."""
    if function is torch.ops.aten.embedding.default:
        return int(args[0].shape[0])
    if function is torch.ops.aten.embedding_dense_backward.default:
        return int(args[2])
    sizes = [size for each in operands if each.is_floating_point() for size in each.shape]
    return max(1, min(sizes, default=1))


def _extent(tensor: torch.Tensor) -> int:
    """Return the elements between the first and the last one of a tensor, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
