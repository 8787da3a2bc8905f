"""What ranks do in `test_pairs`. Functions here run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from infinity.comm.pairs import Pairs


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that differ between ranks and elements, small enough to be summed exactly."""
    return ((torch.arange(length) * 7 + 31 * rank) % 50 - 20).to(dtype)


def summed(
    rank: int, *, size: int, length: int, dtype: torch.dtype, everywhere: bool, longest: int | None = None
) -> torch.Tensor:
    """`values` after a reduce-scatter, or an all-reduce. longest: bytes of a part that the buffer is made for."""
    flat = values(rank, length, dtype)
    pairs = Pairs(dist.group.WORLD, rank, size, sums=longest or length * dtype.itemsize)
    (pairs.all_reduce if everywhere else pairs.reduce_scatter)(flat)
    return flat


def in_order(rank: int, *, size: int, given: list[list[float]]) -> torch.Tensor:
    flat = torch.tensor(given[rank])
    Pairs(dist.group.WORLD, rank, size, sums=64).all_reduce(flat)
    return flat


def gathered(rank: int, *, size: int, length: int) -> torch.Tensor:
    flat = torch.full((length,), float("nan"))
    own = slice(rank * length // size, (rank + 1) * length // size)
    flat[own] = torch.arange(length, dtype=torch.float32)[own]
    Pairs(dist.group.WORLD, rank, size).all_gather(flat)
    return flat


def told(rank: int, *, size: int) -> list[list[Any]]:
    pairs = Pairs(dist.group.WORLD, rank, size)
    return [pairs.tell([rank, 2**62 + turn, -turn]) for turn in range(3)]
