"""Updates on the device follow the compute that made the gradient, and compute that needs their result follows them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from infinity.plan.discovered import Member
from infinity.plan.formats import state_format
from infinity.plan.grad_dtypes import grad_dtypes
from infinity.plan.layout import layout_unit
from infinity.plan.placement import Extent, Policy, State, place
from infinity.rules import Hyper
from infinity.tiers.accelerator import StreamTransfer
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Promise, Transfer, issued
from infinity.update.buffers import UpdateBuffers
from infinity.update.job import Gradient, UpdateJob
from infinity.update.kernels import update_run
from infinity.update.pipeline import UpdatePipeline
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


def test_an_update_is_ordered_on_the_device_alone(lazy: None) -> None:
    device = LateAccelerator()
    layout = layout_unit(0, "unit", [Member("weight", (NUMEL,), 0)], torch.float32, True, 1)
    states = partial(state_format, master="remainder", rule=HYPER.rule, moments="fp32")
    own = partial(
        grad_dtypes, communication=None, accumulation=torch.float32, summed=False, exchanged=False, whole=False
    )
    placement = place([layout], Policy("device", "device", "device", own, states, NUMEL))
    tier = Unwritten("device", placement.nbytes["device"], device, on_device=True)
    tier.memory(placement.of(0, State.OPTIM)).zero_()
    pool = Pool(device.empty, {layout.nbytes: 1}, name="gradients")
    unused = Pool(device.empty, {}, name="tiles")
    places = UpdateBuffers(
        device=device,
        placement=placement,
        tiers={"device": tier},
        grad_tiers={"device": tier},
        formats=states,
        grads=own,
        reads_ahead=1,
        tile_pool=unused,
        grad_tile_pool=unused,
        param_pool=None,
    )
    pipeline = UpdatePipeline(places, update_run)
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(NUMEL, requires_grad=True)
    weight.grad = gradient.clone()
    torch.optim.AdamW([weight], lr=HYPER.lr, weight_decay=HYPER.weight_decay).step()

    buffer = torch.zeros(NUMEL, device=device.torch_device)
    there = gradient.to(device.torch_device)
    torch.accelerator.synchronize()
    lease = pool.lease(layout.nbytes)
    landing = torch.Stream(device.torch_device)  # as the landing thread has
    with landing:
        shard = lease.flat(torch.float32)
        shard.copy_(there)
    arriving: Future[Gradient] = Future()
    arriving.set_result(Gradient(shard, lease, lambda: 0.0, StreamTransfer(landing)))
    del shard
    runs = layout.runs(0, {0: 1})
    job = UpdateJob(layout, lambda: runs, [HYPER], 1.0, 0, arriving)
    reached = device.compute_reached()
    job.attach(buffer.view(torch.uint8), reached, reached)
    pipeline.submit(job)
    computed = issued(job.computed)
    with pool.lease(layout.nbytes) as again:  # the next gradient
        assert (again.flat(torch.float32).fill_(7).cpu() == 7).all()
    device.await_copy(computed)
    torch.testing.assert_close(buffer.cpu(), weight.detach())
    tier.written.keep()
    pipeline.close()
