"""The late device is late, and an engine trains on it as on the CPU.

Mutations that these tests were seen to catch (each by losses or parameters that are NaN or differ):

- `UnitStore.arrive` without `await_copy`: the model computes with NaN.
- `Landing.land` without waiting for the copy to the host: the update reads NaN.
- `NvmeTier._land` (staging) without waiting for the copy: the staging buffer is reused before it is read.
- `NvmeTier._staged_write` without waiting for the copy: NaN is written to the file.
- `UpdatePipeline._conclude` without waiting for the copy to the device.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from typing import Any

import pytest
import torch

from infinity.plan.placement import Extent, State
from infinity.plan.pools import UNITS
from infinity.tier_kind import TierKind
from infinity.tiers.read_ahead import Piece, ReadAhead
from infinity.tiers.transfer import Transfer
from support.configs import PLACEMENTS, engine_config
from support.late_device import LateCopy, LateDevice
from support.loops import Result, assert_same, open_engine, parameters_of, train as train_loop, trained
from support.models import Stack, seeded, token_batches


def test_a_copy_is_invisible_until_it_is_waited_for(late_device: LateDevice) -> None:
    host = torch.arange(16, dtype=torch.uint8)
    there = late_device.empty(16)
    assert late_device.is_host(host) and not late_device.is_host(there[4:])
    copy = late_device.copy(there, host)
    assert not copy.done() and (there == 0xFF).all()
    late_device.await_copy(copy)
    assert copy.done() and torch.equal(there, host)


def test_a_copy_reads_its_source_late() -> None:
    device = LateDevice(delay=10)
    source, there = torch.zeros(8, dtype=torch.uint8), device.empty(8)
    copy = device.copy(there, source)
    source.fill_(7)
    copy.wait()
    assert (there == 7).all()


def test_copies_of_one_direction_are_in_order_and_happen_unasked() -> None:
    device = LateDevice(delay=0.01)
    there, back = device.empty(8), torch.zeros(8, dtype=torch.uint8)
    first = device.copy(there, torch.full((8,), 1, dtype=torch.uint8))
    second = device.copy(there, torch.full((8,), 2, dtype=torch.uint8))
    second.wait()
    assert first.done() and (there == 2).all()
    third = device.copy(back, there)
    while not third.done():
        pass
    assert (back == 2).all() and device.from_device.overdue == 1


def test_a_copy_that_nobody_waited_for_may_outlive_its_device() -> None:
    """The memory of the device stays until the copy has happened; then nothing keeps it."""
    device = LateDevice(delay=0.05)
    there = device.empty(1 << 22)
    memory = weakref.ref(there)
    done = device.copy(there, torch.full((1 << 22,), 3, dtype=torch.uint8))._executed
    del device, there
    gc.collect()
    assert memory() is not None or done.is_set()
    while memory() is not None:
        time.sleep(0.001)
    assert done.is_set()


BATCHES = token_batches(8)
REFERENCES: dict[tuple[bool, float, int], Result] = {}


def train(device: LateDevice | None, param: str, optim: str, bf16: bool, clip: float, accumulation: int) -> Result:
    config = engine_config(param, optim, bf16=bf16, clip=clip, accumulation=accumulation, prefetch_bytes=20_000)
    return trained(seeded(Stack), BATCHES, config, device)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_trains_as_on_the_cpu(
    late_device: LateDevice, param: str, optim: str, bf16: bool, clip: float, accumulation: int
) -> None:
    kind = (bf16, clip, accumulation)
    if kind not in REFERENCES:
        REFERENCES[kind] = train(None, "nvme", "nvme", *kind)
    reference = REFERENCES[kind]
    assert reference.units == 8
    result = train(late_device, param, optim, *kind)
    assert_same(result, reference)
    assert late_device.to_device.copies + late_device.from_device.copies > 50


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_edits_before_an_update_count(late_device: LateDevice, param: str, optim: str, clip: float) -> None:
    """Parameters that the script scales between a backward and its update, wherever the update takes them from."""

    def edited(device: LateDevice | None, param: str, optim: str) -> dict[str, torch.Tensor]:
        config = engine_config(param, optim, clip=clip, update="next_forward", prefetch_bytes=20_000)
        model = seeded(Stack)
        with open_engine(model, config, device) as engine:
            for batch in BATCHES[:4]:
                engine.backward(engine(*batch))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.75)
                engine.step()
            return parameters_of(engine)

    expected, found = edited(None, "nvme", "nvme"), edited(late_device, param, optim)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_unit_that_leaves_before_its_next_use_is_not_copied_up_again(accumulation: int) -> None:
    """Updated in host memory during backward, its parameters reach the device once in a step and direction."""
    device = LateDevice()
    batches = token_batches(8 * accumulation)
    config = engine_config("cpu", "cpu", prefetch_bytes=20_000, accumulation=accumulation)
    ups: list[int] = []
    with open_engine(seeded(Stack), config, device) as engine:
        losses = []
        for number, batch in enumerate(batches):
            if number % accumulation == 0:
                before = device.to_device.copies - engine.parts.store.fetches
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number % accumulation == accumulation - 1:
                engine.updates.runner.settle()
                ups.append(device.to_device.copies - engine.parts.store.fetches - before)
        buffers = engine.parts.plan.buffers(UNITS)
        result = Result(losses, parameters_of(engine), len(engine.parts.units))
    cpu = trained(seeded(Stack), batches, engine_config(accumulation=accumulation, prefetch_bytes=20_000))
    assert_same(result, cpu)
    if accumulation == 1:
        assert ups[0] == buffers  # without a trace, each unit in a buffer may be used next
    assert 0 < max(ups[1:]) <= buffers < result.units


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_an_update_on_the_host_copies_parameters_once(stage: int, bf16: bool, clip: float) -> None:
    """From host memory beside the optimizer states to the unit's buffer, the device's only copy of them."""
    device = LateDevice()
    options: dict[str, Any] = {"bf16": bf16, "clip": clip, "stage": stage}
    with open_engine(seeded(Stack), engine_config("none", "cpu", **options), device) as engine:
        plan, copies = engine.parts.plan, []
        assert plan.placement.tiers(State.PARAM) == {TierKind.HOST}
        assert plan.buffer_bytes(UNITS) == sum(unit.layout.nbytes for unit in engine.units)
        losses = []
        for batch in BATCHES:
            before = device.to_device.copies
            losses += train_loop(engine, [batch])
            engine.updates.runner.settle()
            copies.append(device.to_device.copies - before)
        result = Result(losses, parameters_of(engine), len(engine.units))
    assert_same(result, trained(seeded(Stack), BATCHES, engine_config("none", "cpu", **options)))
    assert copies[1:] == [result.units] * (len(BATCHES) - 1)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("read_ahead_bytes", ["auto", 0])
def test_parameters_on_nvme_are_read_ahead_of_device_buffers(
    monkeypatch: pytest.MonkeyPatch, read_ahead_bytes: str | int, clip: float
) -> None:
    taken: list[int] = []
    take = ReadAhead.take

    def count(ahead: ReadAhead, extent: Extent) -> deque[Piece]:
        pieces = take(ahead, extent)
        taken.append(len(pieces))
        return pieces

    monkeypatch.setattr(ReadAhead, "take", count)
    config = engine_config("nvme", "cpu", prefetch_bytes=20_000, clip=clip)
    config = config.model_copy(
        update={"infinity": config.infinity.model_copy(update={"read_ahead_bytes": read_ahead_bytes})}
    )
    result = trained(seeded(Stack), BATCHES, config, LateDevice())
    assert_same(result, trained(seeded(Stack), BATCHES, engine_config(prefetch_bytes=20_000, clip=clip)))
    assert len(taken) > 30
    assert (sum(taken) > 10) if read_ahead_bytes else not any(taken)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_nothing_is_copied_within_host_memory(clip: float, accumulation: int) -> None:
    """Gradients land where they are stored or updated, and Adam works in the tier."""

    class Watching(LateDevice):
        within = 0

        def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> LateCopy:
            self.within += self.is_host(destination) and self.is_host(source)
            return super().copy(destination, source, after=after)

        def copy_result(self, destination: torch.Tensor, source: torch.Tensor) -> LateCopy:
            return super().copy(destination, source)  # not counted: sums of squares

    device = Watching()
    config = engine_config("cpu", "cpu", bf16=True, clip=clip, accumulation=accumulation, prefetch_bytes=20_000)
    batches = token_batches(4 * accumulation)
    with open_engine(seeded(Stack), config, device) as engine:
        train_loop(engine, batches[: 2 * accumulation])
        engine.updates.runner.settle()
        device.within = 0  # the first step stores gradients whose order is new
        train_loop(engine, batches[2 * accumulation :])
        engine.updates.runner.settle()
        # The embedding's last gradient arrives after its unit was evicted: it is stored in memory that is not reserved.
        assert device.within == (2 if not clip and accumulation == 1 else 0)
