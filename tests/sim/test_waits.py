"""Waits of a simulation: each takes the virtual time of the work that it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from infinity import concurrency
from infinity.comm.agreement.announcements import Announcement, Operation
from infinity.sim.clock import Clock
from infinity.sim.compute import Compute
from infinity.sim.device import META, DeviceFacts, SimulatedAccelerator, SimulatedDevice, SimulatedHost
from infinity.sim.lanes import Drive, DriveEngine, Ended, Stream
from infinity.sim.machine import Links
from infinity.sim.ranks import Ranks, SimulatedCommunicator
from infinity.sim.threads import VirtualExecutor, VirtualPrimitives

LINKS = Links(
    nvme_read=None,
    nvme_write=None,
    nvme_mixed=None,
    memory=4.0,
    host_to_device=1.0,
    device_to_host=1.0,
    collective=None,
    flops={},
    baseline_rss=0,
)
FLAT = torch.empty(8, dtype=torch.uint8, device=META)


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    with concurrency.using(VirtualPrimitives(made, nullcontext)):
        yield made
    made.abort()


def executor() -> VirtualExecutor:
    made: Any = concurrency.one_thread("infinity-comm")
    return made


def accelerator(clock: Clock) -> SimulatedAccelerator:
    facts = DeviceFacts(host_addressable=False, nbytes=1 << 30, bandwidth=4.0)
    return SimulatedAccelerator(clock, facts, LINKS.memory, to_device=1.0, from_device=1.0)


def host(clock: Clock) -> SimulatedHost:
    return SimulatedHost(clock, DeviceFacts(), LINKS.memory, None)


def at(clock: Clock, time: float) -> Ended:
    return Ended(clock, time, None)


# -- threads ---------------------------------------------------------------------------------------------------------


def test_a_result_is_waited_for(clock: Clock) -> None:
    helper = executor()
    slow = helper.submit(clock.sleep, "gather", 3.0)
    quick = helper.submit(lambda: 7)
    assert clock.now == 0.0 and quick.result() == 7 and clock.now == 3.0
    assert slow.done()


def test_a_shutdown_waits_for_the_thread_if_asked(clock: Clock) -> None:
    for waits in (True, False):
        helper = executor()
        began = clock.now
        helper.submit(clock.sleep, "gather", 3.0)
        helper.shutdown(wait=waits)
        assert clock.now - began == (3.0 if waits else 0.0)
        assert len(clock.threads) == (1 if waits else 2)


# -- devices ---------------------------------------------------------------------------------------------------------


def test_a_stream_follows_work_that_ends_at_a_time_unknown_before(clock: Clock) -> None:
    read = DriveEngine(Drive(clock, 2.0, 1.0, 1.5)).read("states", 8)
    stream = Stream(clock, "compute")
    stream.follow(read)
    assert clock.now == 4.0 and stream.run(1.0).start == 4.0


def test_a_thread_of_the_host_waits_for_a_copy(clock: Clock) -> None:
    host(clock).await_copy(at(clock, 3.0))
    assert clock.now == 3.0


def test_a_copy_in_host_memory_starts_after_the_point_that_it_follows(clock: Clock) -> None:
    device = accelerator(clock)
    one, other = device.host_buffer(8), device.host_buffer(8)
    device.copy(one, other, after=at(clock, 3.0)).wait()
    assert clock.now == 7.0


def test_a_value_is_read_after_the_compute_that_makes_it(clock: Clock) -> None:
    device = accelerator(clock)
    with Compute(clock, device, LINKS):
        made = torch.empty(8, device=META).add_(1)[0]
        assert clock.now == 0.0
        made.item()
    assert clock.now == 64 / 4


# -- collectives -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[host, accelerator])
def ranks(clock: Clock, request: pytest.FixtureRequest) -> Iterator[SimulatedCommunicator]:
    device: SimulatedDevice = request.param(clock)
    yield SimulatedCommunicator(clock, device, Ranks(2), 4.0, sharded=True)


@pytest.mark.parametrize(("after", "reached"), [(3.0, 5.0), (5.0, 3.0)])
def test_a_gather_starts_after_the_shard_and_the_compute(
    clock: Clock, ranks: SimulatedCommunicator, after: float, reached: float
) -> None:
    ranks._all_gather(FLAT, at(clock, after), at(clock, reached)).wait()
    assert clock.now == 5.0 + 8 / 4


@pytest.mark.parametrize(("name", "nbytes"), [("_reduce_scatter", 8), ("_all_reduce", 16)])
def test_a_reduction_starts_after_the_compute(
    clock: Clock, ranks: SimulatedCommunicator, name: str, nbytes: int
) -> None:
    getattr(ranks, name)(FLAT, at(clock, 3.0)).wait()
    assert clock.now == 3.0 + nbytes / 4


def test_a_small_exchange_and_the_end_wait_for_collectives(clock: Clock, ranks: SimulatedCommunicator) -> None:
    ranks._thread.submit(clock.sleep, "gather", 3.0)
    ranks._together(Announcement(Operation.BARRIER), lambda: None)
    assert clock.now == 3.0
    ranks.close()
    assert len(clock.threads) == 1
