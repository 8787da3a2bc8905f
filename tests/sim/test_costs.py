"""Costs of the host: wake-ups, launches, Python for each use of a unit, one DRAM, and the pool of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from infinity import concurrency
from infinity.sim.clock import BACKGROUND, FOREGROUND, Clock
from infinity.sim.device import DeviceFacts, SimulatedAccelerator
from infinity.sim.lanes import Drive, DriveEngine, Ended
from infinity.sim.platform import simulated_kernels
from infinity.sim.threads import VirtualPrimitives

WAKEUP = 0.5


def at_once(clock: Clock, *work: Callable[[], object]) -> list[float]:
    """Start a thread for each piece of work now. Returns the times at which they end."""
    with concurrency.using(VirtualPrimitives(clock, nullcontext)):
        ended = [0.0] * len(work)

        def run(number: int) -> None:
            work[number]()
            ended[number] = clock.now

        threads = [concurrency.thread(lambda n=n: run(n), f"infinity-{n}") for n in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.abort()
    return ended


def accelerator(clock: Clock, **costs: float) -> SimulatedAccelerator:
    """A device with links of 2 bytes a second, beside host memory of 4."""
    facts = DeviceFacts(host_addressable=False, nbytes=1 << 30, bandwidth=4.0)
    return SimulatedAccelerator(clock, facts, 4.0, 2.0, 2.0, **costs)


def copied(device: SimulatedAccelerator, nbytes: int) -> Any:
    return device.copy(device.empty(nbytes), device.host_buffer(nbytes))


# -- wake-ups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_a_chain_of_sleeps_costs_a_wakeup_each(count: int) -> None:
    clock = Clock(WAKEUP)
    for number in range(1, count + 1):
        Ended(clock, clock.now + 1.0, None).wait()
        assert clock.now == number * (1.0 + WAKEUP)


def test_a_thread_that_sleeps_for_a_request_or_a_thread_continues_later() -> None:
    clock = Clock(WAKEUP)
    with concurrency.using(VirtualPrimitives(clock, nullcontext)):
        DriveEngine(Drive(clock, 2.0, 1.0, 1.5)).read("states", 8).wait()
        assert clock.now == 4.0 + WAKEUP
        helper = concurrency.one_thread("infinity-update", lambda: None)
        helper.submit(clock.sleep, "gather", 1.0).result()  # the helper's sleep, then this thread's
        assert clock.now == 5.0 + 3 * WAKEUP
        clock.abort()


def test_what_has_ended_before_and_own_work_wake_nobody() -> None:
    clock = Clock(WAKEUP)
    clock.work("update", 2.0)
    Ended(clock, 1.0, None).wait()
    assert clock.now == 2.0


def test_a_stream_that_follows_a_copy_does_not_sleep() -> None:
    clock = Clock(WAKEUP)
    device = accelerator(clock)
    device.await_copy(copied(device, 8))
    device.operate(1.0, 0)
    assert clock.now == 0.0 and device.position()[0] == 4.0 + 1.0


# -- launches and Python -----------------------------------------------------------------------------------------------


def test_a_launch_takes_the_thread_and_not_the_device() -> None:
    clock = Clock()
    device = accelerator(clock, launch=0.25)
    for _ in range(4):
        device.operate(1.0, 0)
    assert clock.now == 1.0 and device.position()[0] == 0.25 + 4 * 1.0
    copied(device, 8)
    assert clock.now == 1.25


def test_a_use_of_a_unit_takes_python() -> None:
    clock = Clock()
    accelerator(clock, unit_overhead=0.25).recorder.unit("block.1")
    assert clock.now == 0.25


# -- one DRAM ----------------------------------------------------------------------------------------------------------


def test_a_copy_and_adam_at_full_speed_slow_each_other() -> None:
    """Each takes 4 s alone; Adam uses all of the DRAM, and the link half of it."""

    def run(dram: float) -> list[float]:
        clock = Clock(dram=dram)
        device = accelerator(clock)
        return at_once(clock, lambda: clock.work("update", 4.0), lambda: copied(device, 8).wait())

    assert run(float("inf")) == [4.0, 4.0]
    assert run(1.5) == [4.0, 4.0]
    assert run(1.0) == [6.0, 4.0]
    adam, copy = run(0.75)  # each has half of 0.75
    assert copy == pytest.approx(4.0 * 0.5 / 0.375) and adam > 6.0


def test_adam_loses_to_copies_what_they_take() -> None:
    clock = Clock(dram=1.0)
    device = accelerator(clock)
    at_once(clock, lambda: clock.work("update", 4.0), lambda: copied(device, 8).wait())
    (adam,) = (record for record in clock.records if record.lane == "update")
    assert adam.lost == {"host_to_device": pytest.approx(2.0)}


def test_threads_and_norms_share_one_bandwidth() -> None:
    clock = Clock()
    assert at_once(clock, *(lambda: clock.work("reduce", 1.0) for _ in range(3))) == pytest.approx([3.0] * 3)


# -- the pool ----------------------------------------------------------------------------------------------------------


def jobs(count: int, *given: tuple[float, str]) -> list[float]:
    """Times at which jobs (seconds by all processors, pool) end that begin at 0, in this order."""
    clock = Clock(processors=count)
    return at_once(clock, *(lambda s=s, p=p: clock.work("update", s, pool=p) for s, p in given))


def test_a_job_has_all_processors() -> None:
    assert jobs(8, (4.0, FOREGROUND)) == [4.0]
    assert jobs(8, (4.0, BACKGROUND)) == [4.0]


def test_a_gradient_behind_adam_waits_for_its_workers() -> None:
    """Its own thread has 1 of 8 processors; Adam's workers do not leave before Adam ends."""
    adam, gradient = jobs(8, (7.0, FOREGROUND), (2.0, FOREGROUND))
    assert adam == pytest.approx(7.0 / (7 / 8)) == 8.0
    assert gradient == pytest.approx(8.0 + (2.0 - 8.0 / 8))


def test_adam_behind_a_gradient_waits_for_the_same_workers() -> None:
    gradient, adam = jobs(8, (0.875, FOREGROUND), (2.0, FOREGROUND))
    assert gradient == 1.0 and adam == pytest.approx(1.0 + 2.0 - 1 / 8)


def test_the_oldest_job_gets_workers_that_become_idle() -> None:
    first, second, third = jobs(4, (1.0, FOREGROUND), (2.0, FOREGROUND), (2.0, FOREGROUND))
    assert first < second < third


def test_pools_of_two_priorities_have_workers_of_their_own() -> None:
    assert jobs(8, (2.0, BACKGROUND), (2.0, FOREGROUND)) == [4.0, 4.0]


@pytest.mark.parametrize(("numel", "share"), [(65_535, 1 / 2), (65_536, 1 / 8)])
def test_small_work_waits_for_no_worker(numel: int, share: float) -> None:
    """Below the kernels' limit a thread works alone, and shares the memory with Adam."""
    clock = Clock(processors=8)
    device = accelerator(clock)
    values = device.host_buffer(4 * numel).view(torch.float32)
    norm = simulated_kernels(device).sum_of_squares
    _, ended = at_once(clock, lambda: clock.work("update", 1e7, pool=FOREGROUND), lambda: norm(values))
    assert ended == pytest.approx(values.nbytes / 4 / share)
