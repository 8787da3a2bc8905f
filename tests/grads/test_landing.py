"""Gradients of several micro-batches are added in the memory where they are stored, in the fewest bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.comm.communicator import Communicator
from infinity.engine.gather import get_full_grad
from infinity.errors import ModelError
from infinity.grads import landing
from infinity.grads.buffers import GradBuffers, Sent
from infinity.grads.store import GradStore
from infinity.plan.formats import grad_dtypes, state_format
from infinity.plan.layout import Member, layout_unit
from infinity.plan.placement import Policy, place
from infinity.tier_kind import TierKind
from infinity.tiers.device import CpuDevice, Device
from infinity.tiers.memory import host_tensor
from infinity.tiers.passing import PassingTier
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.transfer import Transfer
from infinity.units.unit import Unit
from infinity.update.kernels import NATIVE, squared_norm
from support.configs import engine_config
from support.late_device import LateDevice
from support.late_disk import LateSlab, LateTransfer
from support.loops import open_engine
from support.models import Stack, seeded, token_batches

SHAPES = [(70, 300), (11,), (40_000,)]
PIECE = 32 << 10
GRADIENT = torch.Generator().manual_seed(0)


class Bench:
    """One bf16 unit on a tier of memory, whose gradients are summed in fp32."""

    def __init__(self, device: Device, tier: str, *, passes: bool = False) -> None:
        members = [Member(str(k), shape, 0) for k, shape in enumerate(SHAPES)]
        layouts = [layout_unit(index, "unit", members, torch.bfloat16, True, 1) for index in range(2)]
        layout = layouts[0]
        own = partial(
            grad_dtypes, communication=None, accumulation=torch.float32, summed=not passes, exchanged=False, whole=False
        )
        states = partial(state_format, master="remainder", rule="adamw", moments="fp32")
        parameters = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        self.units = [Unit(layout, parameters, torch.device("cpu")) for layout in layouts]
        self.unit = self.units[0]
        kind = TierKind(tier)
        placement = place(layouts, Policy(TierKind.NVME, kind, kind, own, states, 4096))
        self.tier: Any = SlabTier(kind, placement.nbytes[kind], device)
        if not kind.in_memory:
            self.tier = LateSlab(placement.nbytes[kind])
        if passes:
            self.tier = PassingTier(kind, device)
        self.pool = Pool(device.empty, {layout.nbytes: 3}, name="gradients", poison=device.poison, fifo=True)
        leaves = not device.host_addressable and not kind.on_device
        self.host = (
            Pool(device.host_buffer, {layout.nbytes: 2}, name="shards", poison=device.poison) if leaves else None
        )
        stored = Pool(host_tensor, {2 * layout.nbytes: 2}, name="stored") if tier == "nvme" else None
        if passes:
            make = device.empty if kind.on_device else host_tensor
            stored = Pool(make, {layout.nbytes: 1}, name="stored", poison=device.poison)
        self.device = device
        self.places = GradBuffers(
            device, {tier: self.tier}, placement, own, self.pool, None, self.host, stored, threads=1
        )
        self.store = GradStore(Communicator(device), self.places)

    def sent(self, gradient: torch.Tensor, *, last: bool, unit: Unit | None = None) -> Sent:
        lease = self.pool.lease(self.unit.layout.nbytes)
        flat = lease.flat(torch.bfloat16)
        flat.copy_(gradient)
        return Sent(unit or self.unit, flat, lease, self.device.compute_reached(), {0, 1, 2}, None, last)

    def late(self, gradient: torch.Tensor, *, last: bool) -> Sent:
        """Return a gradient that is in its buffer only after a wait for its reduction."""
        sent = self.sent(torch.full_like(gradient, torch.nan), last=last)
        flat = sent.flat
        sent.reduced = LateTransfer(lambda: flat.copy_(gradient))
        return sent

    def gradients(self, count: int) -> list[torch.Tensor]:
        """Return gradients of the unit: bf16 (numel,), zero in padding."""
        made = []
        for _ in range(count):
            flat = torch.zeros(self.unit.layout.numel, dtype=torch.bfloat16)
            for slot in self.unit.layout.slots:
                flat[slot.offset : slot.stop] = torch.randn(slot.numel, generator=GRADIENT).bfloat16()
            made.append(flat)
        return made

    def squares_of(self, total: torch.Tensor) -> float:
        return squared_norm(total, self.unit.layout.parts(0))

    def assert_all_given_back(self) -> None:
        for pool in filter(None, (self.pool, self.host)):
            assert pool.leased == 0, pool.name


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "PIECE_BYTES", PIECE)


CASES = [(CpuDevice, "host"), (LateDevice, "host"), (LateDevice, "device"), (CpuDevice, "device"), (LateDevice, "nvme")]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    device, tier = request.param
    made = Bench(device(), tier)
    yield made
    made.store.close()


def test_sums_and_norms_are_those_of_a_plain_loop(bench: Bench) -> None:
    total = torch.zeros(bench.unit.layout.numel)
    for number, gradient in enumerate(bench.gradients(3)):
        bench.store.keep(bench.sent(gradient, last=number == 2))
        total += gradient
    assert bench.store.squared_norms() == (bench.squares_of(total),) * 2
    bench.store.settle()
    assert torch.equal(bench.store.read(bench.unit), total)
    bench.assert_all_given_back()


def test_a_gradient_is_added_once_it_is_reduced(bench: Bench) -> None:
    gradients = bench.gradients(2)
    for number, gradient in enumerate(gradients):
        bench.store.keep(bench.late(gradient, last=number == 1))
    bench.store.settle()
    assert torch.equal(bench.store.read(bench.unit), gradients[0].float() + gradients[1])


def test_a_step_that_ends_early_has_a_norm(bench: Bench) -> None:
    """The squares of a unit that the last micro-batch did not use are summed for the step."""
    gradient, other = bench.gradients(2)
    bench.store.keep(bench.sent(gradient, last=False))
    later = bench.store.step_squares()
    bench.store.settle()
    bench.store.forget()
    bench.store.keep(bench.sent(other, last=True))
    bench.store.settle()
    assert later() == bench.squares_of(gradient.float())


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: f"{case[0].__name__}-{case[1]}")
@pytest.mark.parametrize("lands", [False, True], ids=["kept", "landed"])
def test_gradients_are_added_to_memory_that_is_not_reserved(
    case: tuple[Callable[[], Device], str], lands: bool
) -> None:
    bench = Bench(case[0](), case[1], passes=True)
    first, second = bench.gradients(2)
    expected = first + second
    bench.store.keep(bench.sent(first, last=False))
    if lands:
        landed = bench.store.land(bench.sent(second, last=True)).result(60)
        assert torch.equal(landed.shard, expected) and landed.squares.total() == bench.squares_of(expected)
        landed.release()
    else:
        bench.store.keep(bench.sent(second, last=False))
        assert bench.store.squared_norms() == (bench.squares_of(expected),) * 2
        assert torch.equal(bench.store.read(bench.unit), expected)
    bench.store.settle()
    bench.assert_all_given_back()
    bench.store.close()


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_a_gradient_lands_on_the_stored_ones(bench: Bench, stored: int) -> None:
    gradients = bench.gradients(stored + 1)
    for gradient in gradients[:-1]:
        bench.store.keep(bench.sent(gradient, last=False))
    landed = bench.store.land(bench.sent(gradients[-1], last=True)).result(60)
    expected = sum((gradient.float() for gradient in gradients), torch.zeros(()))
    landed.reached.wait()
    assert torch.equal(landed.shard, expected)
    assert landed.squares.total() == bench.squares_of(expected)
    landed.release()
    bench.store.settle()
    bench.assert_all_given_back()


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_an_extent_is_written_after_the_update_that_reads_it(case: tuple[Callable[[], Device], str]) -> None:
    bench = Bench(case[0](), case[1])
    first, second, third = bench.gradients(3)
    bench.store.keep(bench.sent(first, last=False))
    landed = bench.store.land(bench.sent(second, last=True)).result(60)
    bench.store.forget()
    seen: list[torch.Tensor] = []

    def update() -> None:
        seen.append(landed.shard.clone())
        landed.release()

    threading.Timer(0.2, update).start()
    bench.store.keep(bench.sent(third, last=True))
    bench.store.settle()
    assert torch.equal(seen[0], first.float() + second)
    assert torch.equal(bench.store.read(bench.unit), third.float())
    bench.store.close()


def test_the_next_gradient_leaves_while_one_is_written() -> None:
    bench = Bench(LateDevice(), "nvme")
    opened, write = threading.Event(), bench.tier.write

    class Gated:
        def __init__(self, transfer: Transfer) -> None:
            self._transfer = transfer

        def wait(self) -> None:
            assert opened.wait(60)
            self._transfer.wait()

        def done(self) -> bool:
            return False

    bench.tier.write = lambda *arguments: Gated(write(*arguments))
    gradients = bench.gradients(2)
    for unit, gradient in zip(bench.units, gradients, strict=True):
        bench.store.keep(bench.sent(gradient, last=True, unit=unit))
    assert bench.store._squares[1].result(60).total() == bench.squares_of(gradients[1].float())
    assert not bench.tier.slab.any(), "the first is still being written"
    opened.set()
    bench.store.settle()
    for unit, gradient in zip(bench.units, gradients, strict=True):
        assert torch.equal(bench.store.read(unit), gradient.float())
    bench.assert_all_given_back()
    bench.store.close()


def test_a_gradient_is_added_once_the_one_before_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write goes on once the thread of gradients waits for it."""
    bench = Bench(LateDevice(), "nvme")
    waiting, write, note = threading.Event(), bench.tier.write, bench.store._landing.note_writing

    class Gated(LateTransfer):
        def __init__(self, transfer: Transfer) -> None:
            super().__init__(lambda: transfer.wait() if waiting.wait(60) else pytest.fail("nobody waits"))

    class Awaited(Future[None]):
        def __init__(self, written: Future[None]) -> None:
            super().__init__()
            self._written = written

        def exception(self, timeout: float | None = None) -> BaseException | None:
            waiting.set()
            return self._written.exception(60)

    monkeypatch.setattr(bench.tier, "write", lambda *arguments: Gated(write(*arguments)))
    monkeypatch.setattr(bench.store._landing, "note_writing", lambda unit, written: note(unit, Awaited(written)))
    gradients = bench.gradients(2)
    total = gradients[0].float() + gradients[1].float()
    for number, gradient in enumerate(gradients):
        bench.store.keep(bench.sent(gradient, last=number == 1))
    try:
        assert bench.store._squares[0].result(60).total() == bench.squares_of(total)
    finally:
        waiting.set()
        bench.store.settle()
    assert torch.equal(bench.store.read(bench.unit), total)
    bench.assert_all_given_back()
    bench.store.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_all_pieces_have_arrived_when_one_fails(tier: str) -> None:
    """They are copied to a buffer that is released then."""
    device = LateDevice(delay=60)
    bench = Bench(device, tier)

    def fails(*arguments: Any, **options: Any) -> float:
        assert device.from_device._pending
        raise MemoryError("too little memory")

    bench.places.kernels = replace(NATIVE, receive=fails)
    bench.store.keep(bench.sent(bench.gradients(1)[0], last=True))
    with pytest.raises(MemoryError, match="too little memory"):
        bench.store.settle()
    assert not device.from_device._pending
    bench.assert_all_given_back()
    bench.store.discard()
    bench.store.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_later_pieces_are_copied_while_one_is_added(tier: str) -> None:
    device = LateDevice(delay=60)
    bench = Bench(device, tier)
    issued, executed, receive = [], [], NATIVE.receive

    def spy(*arguments: Any, **options: Any) -> float:
        issued.append(device.from_device.copies)
        executed.append(device.from_device.copies - len(device.from_device._pending))
        return receive(*arguments, **options)

    bench.places.kernels = replace(NATIVE, receive=spy)
    bench.store.keep(bench.sent(bench.gradients(1)[0], last=True))
    bench.store.settle()
    number = issued[0]
    assert number >= bench.unit.layout.nbytes / PIECE > 3 and set(issued) == {number}
    assert executed[0] == 1 and executed[-1] > 3 and executed == sorted(executed)
    bench.store.close()


# -- engines -----------------------------------------------------------------------------------------------------------


class Traffic:
    """Bytes that gradients move between device and host, and that the host reads and writes to add them."""

    def __init__(self, device: LateDevice, places: GradBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        copy, receive, squares = device.copy, NATIVE.receive, NATIVE.sum_of_squares

        def counted_copy(destination: torch.Tensor, source: torch.Tensor, **after: Any) -> Transfer:
            assert device.is_host(destination)
            self.nbytes += destination.nbytes * (2 if device.is_host(source) else 1)
            return copy(destination, source, **after)

        def counted_receive(target: torch.Tensor, source: torch.Tensor, *, add: bool, **options: Any) -> float:
            self.nbytes += source.nbytes + target.nbytes * (2 if add else 1)
            return receive(target, source, add=add, **options)

        def counted_squares(values: torch.Tensor, **options: Any) -> float:
            self.nbytes += values.nbytes
            return squares(values, **options)

        monkeypatch.setattr(device, "copy", counted_copy)
        kernels = replace(NATIVE, receive=counted_receive, sum_of_squares=counted_squares)
        monkeypatch.setattr(places, "kernels", kernels)


def test_a_micro_batch_moves_at_most_twelve_bytes_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes leave the device and are read again; four are read and written in the sum."""
    device = LateDevice()
    config = engine_config("cpu", "cpu", bf16=True, accumulation=4, clip=0.5, cache_bytes="auto")
    with open_engine(seeded(Stack), config, device) as engine:
        layouts = [unit.layout for unit in engine.parts.units]
        for number, batch in enumerate(token_batches(8)):
            loss = engine(*batch)
            traffic = Traffic(device, engine.updates.collector.places, monkeypatch)
            engine.backward(loss)
            engine.updates.gradients.settle()
            most = 12 if number % 4 else 8
            least = sum(layout.parameter_numel for layout in layouts)
            assert most * least <= traffic.nbytes <= most * sum(layout.numel for layout in layouts)
            monkeypatch.undo()
            engine.step()


@pytest.mark.parametrize("device", [CpuDevice, LateDevice])
def test_gradients_that_arrive_twice_are_summed_in_fp32(device: Callable[[], Device]) -> None:
    """A block used in two reentrant checkpoints: each sends a gradient, and their sum is not rounded to bf16."""
    layer = seeded(lambda: nn.Linear(16, 16, bias=False)).bfloat16()
    inputs = [torch.randn(4, 16, generator=GRADIENT).bfloat16().requires_grad_() for _ in range(4)]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = seeded(lambda: nn.Linear(16, 16, bias=False))

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            ys = [checkpoint(self.layer, x, use_reentrant=True) for x in (first, second)]
            return (ys[0].float().square().sum() + ys[1].float().square().sum()) / 64

    expected = torch.zeros(16, 16)
    for x in reversed(inputs[:2]), reversed(inputs[2:]):
        for one in x:
            (gradient,) = torch.autograd.grad(layer(one).float().square().sum() / 64, layer.weight)
            expected += gradient
    assert not torch.equal(expected, expected.bfloat16())
    config = engine_config("cpu", "cpu", bf16=True, accumulation=2, update="next_forward")
    with open_engine(Twice(), config, device()) as engine:
        for pair in (inputs[:2], inputs[2:]):
            engine.backward(engine(*pair), scale_wrt_gas=False)
        gradient = get_full_grad(engine.module.layer.weight)
        assert gradient is not None and torch.equal(gradient, expected)
        engine.drop_gradients()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_that_is_wider_than_its_parameter_is_refused() -> None:
    """Collecting it would round it, which would change the sum."""
    config = engine_config("cpu", "cpu", bf16=True, accumulation=2)
    with open_engine(seeded(Stack), config) as engine:
        weight = engine.module.blocks[0].up.weight
        weight.grad_dtype = torch.float32
        with pytest.raises(ModelError, match=r"blocks\.0\.up\.weight is torch.float32, wider than its parameter"):
            engine.backward(engine(*token_batches(1)[0]))
