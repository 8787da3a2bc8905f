"""The update pipeline: tiles, order of updates of one unit, errors, non-finite gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from infinity.plan.formats import grad_dtypes
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import Policy, State, place
from infinity.plan.policy import OptimizerFormat
from infinity.rules import Hyper
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import DONE, Promise, Promised, Transfer, issued
from infinity.update.job import Gradient, PlacedUpdate, Squares, UpdateJob
from infinity.update.kernels import squared_norm, update_run
from infinity.update.pipeline import UpdatePipeline
from infinity.update.tiles import UpdateBuffers
from support.late_disk import LateSlab

TILE = 4096
NUMEL = 3 * TILE + 2048
HYPER = Hyper(lr=0.01)
POISON = CpuDevice().poison


class Apart(CpuDevice):
    """A device whose memory the host's kernels may not use. It queues a copy once threads have done their part of what
    the copy follows, as accelerators do.
    """

    host_addressable = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        issued(after or DONE)
        return super().copy(destination, source)


class Bench:
    """One unit of 14,336 fp32 parameters in four tiles, its tier and a pipeline.

    late: the tier is as a late disk. staged: updates work in host buffers, as where the host cannot address the device.
    """

    def __init__(self, *, late: bool = True, staged: bool = False) -> None:
        self.layout = layout_unit(0, "unit", [Member("weight", (NUMEL,), 0)], torch.float32, True, 1)
        states = OptimizerFormat("remainder", HYPER.rule, "fp32")
        own = partial(
            grad_dtypes, communication=None, accumulation=torch.float32, summed=False, exchanged=False, whole=False
        )
        placement = place([self.layout], Policy(TierKind.NVME, TierKind.NVME, TierKind.NVME, own, states, TILE))
        self.extents = {state: placement.of(0, state) for state in State}
        nbytes = placement.nbytes["nvme"]
        self.tier: Any = LateSlab(nbytes) if late else SlabTier(TierKind.HOST, nbytes, CpuDevice())
        self.tiles = Pool(host_tensor, {TILE * 8: 6}, name="tiles", poison=POISON, fifo=True)
        self.grad_tiles = Pool(host_tensor, {TILE * 4: 6}, name="gradient tiles", poison=POISON, fifo=True)
        self.grads = Pool(host_tensor, {self.layout.nbytes: 2}, name="gradients", poison=POISON, fifo=True)
        self.buffer = torch.zeros(self.layout.numel)
        places = UpdateBuffers(
            device=Apart() if staged else CpuDevice(),
            placement=placement,
            tiers={TierKind.NVME: self.tier},
            grad_tiers={TierKind.NVME: self.tier},
            formats=states,
            rank=0,
            grads=own,
            reads_ahead=3,
            tile_pool=self.tiles,
            grad_tile_pool=self.grad_tiles,
            param_pool=Pool(host_tensor, {self.layout.nbytes: 2}, name="shards", poison=POISON) if staged else None,
            beside_compute=True,
        )
        self.pipeline = UpdatePipeline(places, update_run)

    def job(self, step: int, gradient: torch.Tensor | None = None, *, require_finite: bool = False) -> PlacedUpdate:
        """Return an update; without a gradient, it reads the one in the tier."""
        arriving: Future[Gradient] | None = None
        if gradient is not None:
            lease = self.grads.lease(self.layout.nbytes)
            shard = lease.flat(torch.float32)
            shard.copy_(gradient)
            arriving = Future()
            squares = squared_norm(shard, self.layout.parts(0))
            arriving.set_result(Gradient(shard, lease, Squares(squares), DONE))
        runs = self.layout.runs(0, {0: step})
        job = UpdateJob(self.layout, lambda: runs, [HYPER], 1.0, 0, arriving, require_finite=require_finite)
        return PlacedUpdate(job, self.buffer.view(torch.uint8), DONE, DONE)

    def assert_all_given_back(self) -> None:
        for pool in (self.tiles, self.grad_tiles, self.grads):
            assert sum(map(len, pool._free.values())) == sum(pool._counts.values()), pool.name


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.pipeline.close()


def reference(gradients: list[torch.Tensor]) -> torch.Tensor:
    weight = torch.zeros(len(gradients[0]), requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def gradients(count: int, numel: int) -> list[torch.Tensor]:
    return list(torch.randn(count, numel, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("live", [True, False], ids=["gradient in memory", "gradient in its tier"])
def test_updates_of_one_unit_follow_each_other(bench: Bench, live: bool) -> None:
    """The second update is submitted while the first writes its states, and must not read the old ones."""
    given = gradients(4, bench.layout.numel)
    before: Transfer = DONE
    for step, gradient in enumerate(given, 1):
        if not live:
            bench.tier.write(bench.extents[State.GRAD], gradient.view(torch.uint8)).wait()
        job = replace(bench.job(step, gradient if live else None), after=before)
        bench.pipeline.submit(job)
        before = job.job.progress.done
        if not live:
            job.job.progress.done.wait()
    job.job.progress.done.wait()
    torch.testing.assert_close(bench.buffer, reference(given), rtol=1e-6, atol=1e-7)
    stored = bench.tier.slab[: bench.layout.nbytes].view(torch.float32)
    assert torch.equal(stored, bench.buffer)
    assert bench.pipeline.elements == 4 * bench.layout.numel
    bench.assert_all_given_back()


@pytest.fixture
def in_memory() -> Iterator[Bench]:
    made = Bench(late=False)
    yield made
    made.pipeline.close()


def test_a_small_update_in_memory_is_done_when_it_is_submitted(in_memory: Bench, bench: Bench) -> None:
    """A small update runs in the thread that submits it, bit-identical to the update thread's result."""
    given = gradients(3, bench.layout.numel)
    for step, gradient in enumerate(given, 1):
        job = in_memory.job(step, gradient)
        in_memory.pipeline.submit(job)
        assert job.job.progress.computed.done() and job.job.progress.done.done()
        late = bench.job(step, gradient)
        bench.pipeline.submit(late)
        late.job.progress.done.wait()
    assert torch.equal(in_memory.buffer, bench.buffer)
    in_memory.assert_all_given_back()


def test_small_updates_wait_for_those_before_them(in_memory: Bench) -> None:
    """A small update that must wait goes to the thread, and so do later ones, which keeps their order."""
    given = gradients(2, in_memory.layout.numel)
    first, second = in_memory.job(1, given[0]), in_memory.job(2, given[1])
    save = Promise()
    first, second = replace(first, after=save), replace(second, after=first.job.progress.done)
    in_memory.pipeline.submit(first)
    in_memory.pipeline.submit(second)
    assert not first.job.progress.done.done() and not second.job.progress.done.done()
    save.keep()
    second.job.progress.done.wait()
    torch.testing.assert_close(in_memory.buffer, reference(given), rtol=1e-6, atol=1e-7)
    in_memory.assert_all_given_back()


def test_a_failure_of_a_small_update_is_raised_by_who_waits(in_memory: Bench) -> None:
    job = in_memory.job(0, gradients(1, in_memory.layout.numel)[0])  # steps count from 1
    in_memory.pipeline.submit(job)
    for promise in (job.job.progress.computed, job.job.progress.done):
        with pytest.raises(ValueError, match="step is 0"):
            promise.wait()
    in_memory.assert_all_given_back()


@pytest.mark.parametrize("tile", [0, 1, 3])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_fails(bench: Bench, kind: str, tile: int) -> None:
    """Waits for the update raise the error, all buffers are released, and other updates continue."""
    gradient = gradients(1, bench.layout.numel)[0]
    where = bench.extents[State.OPTIM].offset + tile * TILE * 8
    bench.tier.failing.add((kind, where))
    failing, sound = bench.job(1, gradient), bench.job(1, gradient)
    bench.pipeline.submit(failing)
    with pytest.raises(OSError, match=f"bytes at {where}"):
        failing.job.progress.done.wait()
    bench.pipeline.submit(sound)
    sound.job.progress.done.wait()
    bench.assert_all_given_back()


def test_an_update_after_one_whose_write_failed(bench: Bench) -> None:
    """The second update needs states that were not written, so it fails with the same error and writes nothing."""
    first, second = gradients(2, bench.layout.numel)
    where = bench.extents[State.OPTIM].offset + TILE * 8
    bench.tier.failing.add(("write", where))
    failing, following = bench.job(1, first), bench.job(2, second)
    following = replace(following, after=failing.job.progress.done)
    bench.pipeline.submit(failing)
    bench.pipeline.submit(following)
    failing.job.progress.computed.wait()
    for job in (failing, following):
        with pytest.raises(OSError, match=f"bytes at {where}"):
            job.job.progress.done.wait()
    bench.assert_all_given_back()


def test_a_gradient_that_never_came(bench: Bench) -> None:
    arriving: Future[Gradient] = Future()
    arriving.set_exception(OSError(5, "Input/output error", "swap"))
    job = bench.job(1)
    job = replace(job, job=replace(job.job, gradient=arriving))
    bench.pipeline.submit(job)
    with pytest.raises(OSError, match="Input/output error"):
        job.job.progress.computed.wait()
    with pytest.raises(OSError, match="Input/output error"):
        job.job.progress.done.wait()
    bench.assert_all_given_back()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, TILE, NUMEL - 1])
def test_a_gradient_that_is_not_finite_changes_nothing(bench: Bench, bad: float, where: int) -> None:
    """A non-finite element at any place leaves all values and states of the unit unchanged."""
    first, second, third = gradients(3, bench.layout.numel)
    for step, gradient in ((1, first), (2, second)):
        job = bench.job(step, gradient)
        bench.pipeline.submit(job)
        job.job.progress.done.wait()
    slab = bench.tier.slab.clone()
    third[where] = bad
    job = bench.job(3, third, require_finite=True)
    bench.pipeline.submit(job)
    job.job.progress.done.wait()
    assert bench.pipeline.refused == ["unit"]
    assert torch.equal(bench.tier.slab, slab)
    assert torch.equal(bench.buffer, slab[: bench.layout.nbytes].view(torch.float32))
    bench.assert_all_given_back()


def test_an_update_begins_once_it_may(bench: Bench) -> None:
    """An update waits for a save that still has to read the states, even if the thread is idle."""
    before: list[torch.Tensor] = []
    released: Future[None] = Future()

    def release() -> None:
        before.append(bench.tier.slab.clone())
        released.set_result(None)

    threading.Timer(0.2, release).start()
    job = replace(bench.job(1, gradients(1, bench.layout.numel)[0]), after=Promised(released))
    bench.pipeline.submit(job)
    job.job.progress.done.wait()
    assert not before[0].any() and bench.tier.slab.any()
    bench.assert_all_given_back()


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_parameters_that_arrive_after_another_units_update(staged: bool) -> None:
    """Parameters gathered after another unit's update do not deadlock: the pipeline finishes that update instead of
    waiting for them first.
    """
    bench = Bench(staged=staged)
    first, second = (bench.job(1, gradient) for gradient in gradients(2, bench.layout.numel))
    second = replace(second, arrives=first.job.progress.computed)
    both_are_queued = Promise()
    first = replace(first, after=both_are_queued)
    bench.pipeline.submit(first)
    bench.pipeline.submit(second)
    both_are_queued.keep()
    second.job.progress.done.wait()
    bench.pipeline.close()
    bench.assert_all_given_back()


def test_parameters_that_arrive_with_the_update_before(bench: Bench) -> None:
    """The second update of a unit that was fetched during its first waits for the transfers under way itself."""
    given = gradients(2, bench.layout.numel)
    first, second = (bench.job(step, gradient) for step, gradient in enumerate(given, 1))
    second = replace(second, arrives=first.job.progress.computed, after=first.job.progress.done)
    bench.pipeline.submit(first)
    bench.pipeline.submit(second)
    second.job.progress.done.wait()
    torch.testing.assert_close(bench.buffer, reference(given), rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_being_read_keeps_its_buffer_while_no_buffer_is_free_for_states(bench: Bench) -> None:
    """Otherwise the read would write to the gradient of another tile."""
    expected = gradients(1, NUMEL)[0]
    bench.tier.write(bench.extents[State.GRAD], host_tensor(4 * NUMEL).copy_(expected.view(torch.uint8))).wait()
    stages = bench.pipeline._stages
    running = stages.open(bench.job(1))
    assert running is not None
    leases = [bench.tiles.lease(TILE * 8) for _ in range(6)]
    for _ in range(2):
        assert stages.read(running) is None
        assert bench.grad_tiles.leased == 1
    for lease in leases:
        lease.release()
    item = stages.read(running)
    assert item is not None and item.grad is not None and bench.grad_tiles.leased == 1
    item.grad.arrived.wait()
    assert torch.equal(item.grad.tensor.view(torch.float32), expected[:TILE])
    stages.end(stages.compute(item))
    while running.tiles:
        tile = stages.read(running)
        assert tile is not None
        stages.end(stages.compute(tile))
    bench.assert_all_given_back()


def test_closing_waits_for_the_updates_that_are_queued(bench: Bench) -> None:
    """`close` waits for queued updates, because the tiers are closed next."""
    released: Future[None] = Future()
    threading.Timer(0.2, lambda: released.set_result(None)).start()
    gradient = gradients(1, bench.layout.numel)[0]
    job = replace(bench.job(1, gradient), after=Promised(released))
    bench.pipeline.submit(job)
    bench.pipeline.close()
    assert job.job.progress.done.done()
    assert torch.equal(bench.tier.slab[: bench.layout.nbytes].view(torch.float32), bench.buffer)
    bench.assert_all_given_back()
