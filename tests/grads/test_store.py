"""Gradients are waited for before the update or their tier uses their bytes.

Transfers are carried out when they are waited for, on a late tier and a late device. Buffers are NaN before that and
after their release.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from infinity.comm.communicator import Communicator
from infinity.grads.buffers import GradBuffers, Sent
from infinity.grads.store import GradStore
from infinity.plan.formats import grad_dtypes, state_format
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import Policy, State, place
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.pool import Pool
from infinity.tiers.transfer import Failed, Transfer
from infinity.units.unit import Unit
from support.late_device import LateDevice
from support.late_disk import LateSlab, LateTransfer

NUMEL = 4096
GRADIENTS = list(torch.randn(3, NUMEL, generator=torch.Generator().manual_seed(0)))


class Gate:
    """A transfer that ends shortly after the first query, or when it is opened. It copies its bytes then."""

    def __init__(self, open_after: float = 0.2) -> None:
        self._opened = threading.Event()
        self._timer = threading.Timer(open_after, self._opened.set)
        self._timer.start()

    def wait(self) -> None:
        assert self._opened.wait(60)

    def done(self) -> bool:
        return self._opened.is_set()


class Bench:
    """One unit of 4096 fp32 parameters, its late tier and a store of gradients."""

    def __init__(self, device: Device) -> None:
        layout = layout_unit(0, "unit", [Member("weight", (NUMEL,), 0)], torch.float32, True, 1)
        own = partial(
            grad_dtypes, communication=None, accumulation=torch.float32, summed=True, exchanged=False, whole=False
        )
        states = partial(state_format, master="remainder", rule="adamw", moments="fp32")
        self.unit = Unit(layout, [nn.Parameter(torch.empty(NUMEL))], torch.device("cpu"))
        placement = place([layout], Policy(TierKind.NVME, TierKind.NVME, TierKind.NVME, own, states, NUMEL))
        self.extent = placement.of(0, State.GRAD)
        self.tier = LateSlab(placement.nbytes["nvme"])
        make = partial(Pool, poison=CpuDevice().poison, fifo=True)
        self.pool = make(device.empty, {layout.nbytes: 2}, name="gradients")
        self.stored = make(host_tensor, {layout.nbytes: 1}, name="stored gradients")
        self.host = None if device.host_addressable else make(host_tensor, {layout.nbytes: 2}, name="shards")
        places = GradBuffers(
            device=device,
            tiers={TierKind.NVME: self.tier},
            placement=placement,
            dtypes=own,
            pool=self.pool,
            reduce_pool=None,
            host_pool=self.host,
            stored_pool=self.stored,
            threads=1,
        )
        self.device = device
        self.store = GradStore(Communicator(device), places)

    def sent(self, gradient: torch.Tensor, reduced: Transfer | None = None) -> Sent:
        lease = self.pool.lease(self.unit.layout.nbytes)
        flat = lease.flat(torch.float32)
        flat.copy_(gradient)
        return Sent(self.unit, flat, lease, reduced or self.device.compute_reached(), {0}, None)

    def late(self, gradient: torch.Tensor) -> Sent:
        """Return a gradient that is in its buffer only after a wait for its reduction."""
        sent = self.sent(torch.full((NUMEL,), torch.nan))
        flat = sent.flat
        sent.reduced = LateTransfer(lambda: flat.copy_(gradient))
        return sent

    @property
    def in_tier(self) -> torch.Tensor:
        start = self.extent.offset
        return self.tier.slab[start : start + 4 * NUMEL].view(torch.float32)

    def assert_all_given_back(self) -> None:
        for pool in filter(None, (self.pool, self.stored, self.host)):
            assert sum(map(len, pool._free.values())) == sum(pool._counts.values()), pool.name


@pytest.fixture(params=[CpuDevice, LateDevice], ids=["cpu", "late device"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param())
    yield made
    made.store.close()


def test_a_gradient_is_stored_once_it_is_reduced(bench: Bench) -> None:
    bench.store.keep(bench.late(GRADIENTS[0]))
    bench.store.settle()
    assert torch.equal(bench.in_tier, GRADIENTS[0])
    squares = GRADIENTS[0].double().square().sum().item()
    assert bench.store.squared_norms() == pytest.approx((squares, squares), rel=1e-9)
    bench.assert_all_given_back()


def test_a_gradient_is_dropped_once_it_is_reduced(bench: Bench) -> None:
    """The reduction would write to a buffer that another gradient uses."""
    sent = bench.late(GRADIENTS[0])
    sent.drop()
    assert sent.reduced.done()
    sent = bench.sent(GRADIENTS[0], reduced=Failed(RuntimeError("another rank has died")))
    sent.drop()
    bench.assert_all_given_back()


def test_a_gradient_lands_once_it_is_reduced(bench: Bench) -> None:
    gradient = bench.store.land(bench.late(GRADIENTS[0])).result(60)
    assert torch.equal(gradient.shard, GRADIENTS[0])
    gradient.release()
    bench.assert_all_given_back()


def test_gradients_are_added_to_those_that_are_stored(bench: Bench) -> None:
    for gradient in GRADIENTS[:2]:
        bench.store.keep(bench.sent(gradient))
    landed = bench.store.land(bench.sent(GRADIENTS[2])).result(60)
    assert torch.equal(landed.shard, GRADIENTS[0] + GRADIENTS[1] + GRADIENTS[2])
    squares = landed.shard.double().square().sum().item()
    landed.release()
    assert bench.store.squared_norms() == pytest.approx((0.0, squares)), "its sum outlives it"
    of_step = bench.store.step_squares()
    bench.store.forget()
    assert of_step() == pytest.approx(squares)
    bench.store.settle()
    bench.assert_all_given_back()


def test_a_gradient_that_did_not_land_has_no_norm(bench: Bench) -> None:
    """The norm is NaN. An error would leave the other ranks waiting in the sum; the update raises it."""
    bench.store.keep(bench.sent(GRADIENTS[0]))
    bench.tier.failing.add(("read", bench.extent.offset))
    landed = bench.store.land(bench.sent(GRADIENTS[1]))
    assert isinstance(landed.exception(60), OSError)
    assert bench.store.squared_norms() == pytest.approx((0.0, math.nan), nan_ok=True)


def test_settling_waits_for_what_is_under_way(bench: Bench) -> None:
    bench.store.keep(bench.sent(GRADIENTS[0], reduced=Gate()))
    bench.store.settle()
    assert torch.equal(bench.in_tier, GRADIENTS[0])


def test_settling_raises_what_went_wrong(bench: Bench) -> None:
    bench.tier.failing.add(("write", bench.extent.offset))
    bench.store.keep(bench.sent(GRADIENTS[0]))
    with pytest.raises(OSError, match="No space left"):
        bench.store.settle()
    bench.assert_all_given_back()


def test_a_norm_of_gradients_that_failed_is_no_hang(bench: Bench) -> None:
    """`squared_norms` raises the read error of a sum that failed, instead of waiting for a norm that never comes."""
    bench.tier.failing.add(("read", bench.extent.offset))
    for gradient in GRADIENTS[:2]:
        bench.store.keep(bench.sent(gradient))
    told: list[str] = []

    def ask() -> None:
        try:
            bench.store.squared_norms()
        except OSError as error:
            told.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert len(told) == 1 and "Input/output error" in told[0]
    bench.store.discard()
    bench.assert_all_given_back()


def test_reading_waits_for_what_is_under_way(bench: Bench) -> None:
    bench.store.keep(bench.sent(GRADIENTS[0], reduced=Gate()))
    assert torch.equal(bench.store.read(bench.unit), GRADIENTS[0])


def test_what_is_written_is_read(bench: Bench) -> None:
    bench.store.keep(bench.sent(GRADIENTS[0]))
    bench.store.settle()
    bench.store.write(bench.unit, GRADIENTS[1])
    assert torch.equal(bench.in_tier, GRADIENTS[1])
    assert torch.equal(bench.store.read(bench.unit), GRADIENTS[1])


def test_discarding_waits_for_what_is_under_way(bench: Bench) -> None:
    """`discard` waits for stores under way: all buffers are free, and nothing of the step is written later."""
    bench.store.keep(bench.sent(GRADIENTS[0], reduced=Gate()))
    bench.store.discard()
    bench.assert_all_given_back()
    assert not bench.store.units


class Noted(Future[None]):
    """The end of a write that notes whether it was waited for."""

    waited = False

    def result(self, timeout: float | None = None) -> None:
        self.waited = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waited = True
        return super().exception(timeout)


@pytest.mark.parametrize("how", ["settle", "discard"])
def test_settling_and_discarding_wait_for_writes(bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may go on after the move of its gradient has ended."""
    written = Noted()

    def submit(finish: Callable[..., None], *arguments: Any) -> Noted:
        finish(*arguments)
        written.set_result(None)
        return written

    monkeypatch.setattr(bench.store._writer, "submit", submit)
    bench.store.keep(bench.sent(GRADIENTS[0]))
    getattr(bench.store, how)()
    assert written.waited


def test_a_write_that_no_thread_can_wait_for_gives_its_buffer_back(bench: Bench) -> None:
    """Otherwise the model's thread would wait forever for a buffer of the next gradient."""
    bench.store._writer.shutdown()
    for gradient in GRADIENTS:  # more than there are buffers
        bench.store.keep(bench.sent(gradient))
    with pytest.raises(RuntimeError, match="after shutdown"):
        bench.store.settle()
    bench.store.discard()
    bench.assert_all_given_back()


def test_closing_waits_for_writes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thing that a write does is to release its buffer, whose memory is freed next."""
    waits, shutdown = list[bool](), bench.store._writer.shutdown

    def shut(wait: bool = True) -> None:
        waits.append(wait)
        shutdown(wait)

    monkeypatch.setattr(bench.store._writer, "shutdown", shut)
    bench.store.close()
    assert waits == [True]


def test_closing_waits_for_what_is_under_way(bench: Bench) -> None:
    """`close` waits for stores under way, because the tier is closed next."""
    bench.store.keep(bench.sent(GRADIENTS[0], reduced=Gate()))
    bench.store.close()
    assert torch.equal(bench.in_tier, GRADIENTS[0])
    bench.assert_all_given_back()
