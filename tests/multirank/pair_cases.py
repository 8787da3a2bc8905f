"""Code of the ranks in `test_pairs`. These functions run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from infinity.comm.communicator import Communicator
from infinity.comm.pairs import PairwiseCollectives
from infinity.plan.layout import Member, layout_unit
from multirank.cases import SAMPLES
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import LateTransfer
from support.loops import open_engine
from support.models import Stack, seeded

NUMEL = 4096


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return integers that differ between ranks and elements, small enough for exact sums."""
    return ((torch.arange(length) * 7 + 31 * rank) % 50 - 20).to(dtype)


def summed(
    rank: int, *, size: int, length: int, dtype: torch.dtype, everywhere: bool, longest: int | None = None
) -> torch.Tensor:
    """Return `values` after a reduce-scatter or all-reduce. longest: bytes of the largest part that fits the buffer."""
    flat = values(rank, length, dtype)
    pairs = PairwiseCollectives(dist.group.WORLD, rank, size, sums=longest or length * dtype.itemsize)
    (pairs.all_reduce if everywhere else pairs.reduce_scatter)(flat)
    return flat


def in_order(rank: int, *, size: int, given: list[list[float]]) -> torch.Tensor:
    flat = torch.tensor(given[rank])
    PairwiseCollectives(dist.group.WORLD, rank, size, sums=64).all_reduce(flat)
    return flat


def gathered(rank: int, *, size: int, length: int) -> torch.Tensor:
    flat = torch.full((length,), float("nan"))
    own = slice(rank * length // size, (rank + 1) * length // size)
    flat[own] = torch.arange(length, dtype=torch.float32)[own]
    PairwiseCollectives(dist.group.WORLD, rank, size).all_gather(flat)
    return flat


def reported(rank: int, *, size: int) -> list[list[Any]]:
    pairs = PairwiseCollectives(dist.group.WORLD, rank, size)
    return [pairs.all_gather_ints([rank, 2**62 + turn, -turn]) for turn in range(3)]


def sent(rank: int, *, size: int, length: int) -> dict[str, int]:
    """Return the bytes that this rank sends in each collective of `length` fp32 elements."""
    pairs = PairwiseCollectives(dist.group.WORLD, rank, size, sums=256)
    nbytes = 0
    send = dist.isend

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal nbytes
        nbytes += tensor.nbytes
        return send(tensor, **options)

    found = {}
    with patch.object(dist, "isend", counting):
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            nbytes = 0
            getattr(pairs, name)(torch.zeros(length))
            found[name] = nbytes
    return found


def accounted(rank: int, *, folder: str) -> tuple[int, int]:
    """Return host bytes in the ledger of an engine with all states on the device, and bytes of its collectives."""
    config = engine_config("none", "none", folder=folder, micro=SAMPLES)
    with open_engine(seeded(lambda: Stack(depth=4)), config) as engine:
        return engine.ledger.tier_bytes()["host"], engine.ranks.nbytes


def late(rank: int, *, what: str, sharded: bool) -> tuple[torch.Tensor, bool]:
    """Run a collective of `Communicator` on memory that is valid only after a wait for the transfer that it is given.
    Returns the result, and whether every point of the device's compute was waited for.
    """
    device = LateDevice()
    ranks = Communicator(device, sharded=sharded)
    try:
        layout = layout_unit(0, "unit", [Member("weight", (NUMEL,), 0)], torch.float32, True, ranks.shards)
        ranks.set_layouts([layout])
        flat = torch.full((layout.numel,), torch.nan)
        part = ranks.shard(flat) if what == "gather" else flat
        values = torch.arange(float(layout.numel))
        arriving = ranks.shard(values) if what == "gather" else values

        def arrive() -> None:
            part.copy_(arriving)

        if what == "gather":
            ranks.all_gather(flat, LateTransfer(arrive), 0).wait()
            return flat, all(point.waited for point in device.reached)
        arrive()
        ranks.reduce(flat, layout, {0}).wait()
        return ranks.shard(flat).clone(), all(point.waited for point in device.reached)
    finally:
        ranks.close()
