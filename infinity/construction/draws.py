"""Fills large tensors with random numbers on several threads, with the same values for any number of threads.

A fill of more than `PIECE` elements is cut into pieces, each with a generator of its own. Their seeds derive from one
draw of torch's generator and the number of the piece, so that neither threads nor their timing matter. The code that
calls for the fill runs on one thread, in order, and needs no knowledge of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PIECE = 1 << 20
"""Elements of a piece. Seeding a generator takes microseconds, a piece milliseconds."""

_FILLS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


class ParallelDraws(TorchDispatchMode):
    """Divides `normal_` and `uniform_` of large host tensors among the threads of `pool` in its block.

    Other operators, fills with a generator of the caller's, and small or strided tensors are left to torch.
    """

    def __init__(self, pool: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if operator not in _FILLS or not _divisible(args[0]) or (kwargs and kwargs.get("generator") is not None):
            return operator(*args, **(kwargs or {}))
        tensor, *bounds = args
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        pieces = tensor.detach().view(-1).split(PIECE)

        def fill(index: int) -> None:
            # torch's generator uses 32 bits of a seed: consecutive ones differ.
            operator(pieces[index], *bounds, generator=torch.Generator("cpu").manual_seed(seed + index))

        for _ in self._pool.map(fill, range(len(pieces))):
            pass
        return tensor


def _divisible(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > PIECE
        and tensor.is_contiguous()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_inference()
    )
