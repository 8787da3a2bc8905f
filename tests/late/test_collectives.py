"""Collectives of a device are ordered with the compute and the copies around them.

Nothing runs that is not waited for, so an order that is missing shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import late
from infinity.comm.communicator import Communicator
from infinity.plan.layout import Member, layout_unit
from infinity.tiers.transfer import DONE, Transfer, issued
from late import queued
from late.device import LateAccelerator

LAYOUT = layout_unit(0, "unit", [Member("weight", (1024,), 0)], torch.float32, True, 1)


@pytest.fixture
def device(lazy: None) -> Iterator[LateAccelerator]:
    queued.register()
    dist.init_process_group(queued.NAME, store=dist.HashStore(), rank=0, world_size=1)
    yield LateAccelerator()
    dist.destroy_process_group()


@pytest.fixture
def ranks(device: LateAccelerator) -> Iterator[Communicator]:
    yield from opened(device, sharded=True)


@pytest.fixture
def replicas(device: LateAccelerator) -> Iterator[Communicator]:
    yield from opened(device, sharded=False)


def opened(device: LateAccelerator, *, sharded: bool) -> Iterator[Communicator]:
    ranks = Communicator(device, sharded=sharded)
    ranks.set_layouts([LAYOUT])
    yield ranks
    ranks.close()


def gather(ranks: Communicator, flat: torch.Tensor) -> Transfer:
    return ranks.all_gather(flat, DONE, 0)


def reduce(ranks: Communicator, flat: torch.Tensor) -> Transfer:
    return ranks.reduce(flat, LAYOUT, {0})


def broadcast(ranks: Communicator, flat: torch.Tensor) -> Transfer:
    ranks.broadcast(flat)
    return DONE


COLLECTIVES = pytest.mark.parametrize(
    "collective, kind", [(gather, "ranks"), (reduce, "ranks"), (reduce, "replicas"), (broadcast, "ranks")]
)


def is_doubled(flat: torch.Tensor) -> bool:
    """Return whether a collective has run once, on compute's result. Runs what compute waits for."""
    return bool((flat.cpu() == 2).all())


@COLLECTIVES
def test_a_collective_follows_the_compute_of_the_caller(
    request: pytest.FixtureRequest, collective: Callable[[Communicator, torch.Tensor], Transfer], kind: str
) -> None:
    ranks: Communicator = request.getfixturevalue(kind)
    flat = torch.ones(LAYOUT.numel, device="late")
    assert late.pending()
    collective(ranks, flat).wait()
    assert is_doubled(flat)


def test_a_gather_follows_the_read_of_its_shard(ranks: Communicator, device: LateAccelerator) -> None:
    flat, host = torch.empty(LAYOUT.numel, device="late"), device.host_buffer(LAYOUT.nbytes)
    host.view(torch.float32).fill_(1)
    ranks.all_gather(flat, device.copy(flat.view(torch.uint8), host), 0).wait()
    assert is_doubled(flat)


@COLLECTIVES
def test_ranks_agree_on_the_next_collective_after_one_has_ended(
    request: pytest.FixtureRequest, collective: Callable[[Communicator, torch.Tensor], Transfer], kind: str
) -> None:
    ranks: Communicator = request.getfixturevalue(kind)
    flat = torch.ones(LAYOUT.numel, device="late")
    issued(collective(ranks, flat))
    counters = late.counters()
    assert counters.kernels_executed == counters.kernels_queued and counters.copies_executed == counters.copies_queued


@pytest.mark.parametrize("name", ["_all_gather", "_reduce_scatter", "_all_reduce"])
def test_compute_follows_a_collective(ranks: Communicator, device: LateAccelerator, name: str) -> None:
    """The transfer that a collective returns ends with it, even if nothing else waits for the collective."""
    flat, reached = torch.ones(LAYOUT.numel, device="late"), device.compute_reached()
    arguments = (flat, DONE, reached) if name == "_all_gather" else (flat, reached)
    transfer = ranks._thread.submit(getattr(ranks, name), *arguments).result()
    assert late.pending()
    device.await_copy(transfer)
    assert is_doubled(flat)


def test_a_broadcast_has_ended_when_it_returns(ranks: Communicator, device: LateAccelerator) -> None:
    flat = torch.ones(LAYOUT.numel, device="late")
    ranks._thread.submit(ranks._broadcast, flat, 0, device.compute_reached()).result()
    assert is_doubled(flat)
