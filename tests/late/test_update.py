"""Updates on the device follow the compute that made the gradient, and compute that needs their result follows them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from infinity.plan.formats import grad_dtypes
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import Extent, Policy, State, place
from infinity.plan.policy import OptimizerFormat
from infinity.rules import Hyper
from infinity.tier_kind import TierKind
from infinity.tiers.accelerator import StreamTransfer
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Promise, Transfer, issued
from infinity.update.job import Gradient, PlacedUpdate, Squares, UpdateJob
from infinity.update.kernels import update_run
from infinity.update.pipeline import UpdatePipeline
from infinity.update.tiles import UpdateBuffers
from late.device import LateAccelerator

NUMEL = 4096
HYPER = Hyper(lr=0.01)


class Unwritten(SlabTier):
    """A tier whose writes end when `written` is kept, so that no wait for them carries out the update."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.written = Promise()

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0) -> Transfer:
        super().write(extent, source, offset)
        return self.written


class Bench:
    """One unit whose states are on the device, and a gradient of it. Nothing is queued."""

    def __init__(self) -> None:
        self.device = device = LateAccelerator()
        self.layout = layout_unit(0, "unit", [Member("weight", (NUMEL,), 0)], torch.float32, True, 1)
        states = OptimizerFormat("remainder", HYPER.rule, "fp32")
        own = partial(
            grad_dtypes, communication=None, accumulation=torch.float32, summed=False, exchanged=False, whole=False
        )
        placement = place([self.layout], Policy(TierKind.DEVICE, TierKind.DEVICE, TierKind.DEVICE, own, states, NUMEL))
        self.tier = Unwritten(TierKind.DEVICE, placement.nbytes["device"], device)
        self.tier.memory(placement.of(0, State.OPTIM)).zero_()
        self.tier.memory(placement.of(0, State.PARAM)).zero_()
        self.gradients = Pool(device.empty, {self.layout.nbytes: 1}, name="gradients")
        unused = Pool(device.empty, {}, name="tiles")
        buffers = UpdateBuffers(
            device=device,
            placement=placement,
            tiers={TierKind.DEVICE: self.tier},
            grad_tiers={TierKind.DEVICE: self.tier},
            formats=states,
            rank=0,
            grads=own,
            reads_ahead=1,
            tile_pool=unused,
            grad_tile_pool=unused,
            param_pool=None,
            beside_compute=False,
        )
        self.pipeline = UpdatePipeline(buffers, update_run)
        gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
        self.updated = torch.zeros(NUMEL, requires_grad=True)
        """The parameters, zeros before, as torch updates them."""
        self.updated.grad = gradient.clone()
        torch.optim.AdamW([self.updated], lr=HYPER.lr, weight_decay=HYPER.weight_decay).step()
        self.buffer = torch.zeros(NUMEL, device=device.torch_device)
        self.gradient = gradient.to(device.torch_device)
        torch.accelerator.synchronize()

    def job(self) -> UpdateJob:
        """Return an update whose gradient is on its way, on a stream as the landing thread has."""
        lease = self.gradients.lease(self.layout.nbytes)
        landing = torch.Stream(self.device.torch_device)
        with landing:
            shard = lease.flat(torch.float32)
            shard.copy_(self.gradient)
        arriving: Future[Gradient] = Future()
        arriving.set_result(Gradient(shard, lease, Squares(0.0), StreamTransfer(landing)))
        runs = self.layout.runs(0, {0: 1})
        return UpdateJob(self.layout, lambda: runs, [HYPER], 1.0, 0, arriving)

    def close(self) -> None:
        self.tier.written.keep()
        self.pipeline.close()
        torch.accelerator.synchronize()


def test_an_update_is_ordered_on_the_device_alone(lazy: None) -> None:
    bench = Bench()
    job, reached = bench.job(), bench.device.compute_reached()
    bench.pipeline.submit(PlacedUpdate(job, bench.buffer.view(torch.uint8), reached, reached))
    computed = issued(job.progress.computed)
    with bench.gradients.lease(bench.layout.nbytes) as again:  # the next gradient
        values = again.flat(torch.float32).fill_(7)
        assert (values.cpu() == 7).all()
        bench.device.await_copy(computed)
        torch.testing.assert_close(bench.buffer.cpu(), bench.updated.detach())
        assert (values.cpu() == 7).all()
        del values
    bench.close()


def test_an_update_overwrites_a_buffer_after_the_compute_that_reads_it(lazy: None) -> None:
    """The update reads the parameters from their tier into the buffer."""
    bench = Bench()
    read = bench.buffer + 1
    job = bench.job()
    bench.pipeline.submit(PlacedUpdate(job, bench.buffer.view(torch.uint8), None, bench.device.compute_reached()))
    issued(job.progress.computed).wait()
    assert (read.cpu() == 1).all()
    torch.testing.assert_close(bench.buffer.cpu(), bench.updated.detach())
    bench.close()
