"""Gradients on the late device: sums in the device's memory and in the host's, and norms that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import late
from grads.test_landing import Bench
from infinity.grads.squares import DeviceSquares
from infinity.plan.layout import Part
from infinity.update.kernels import NATIVE, squared_norm
from late.device import LateAccelerator
from late.exact import EXACT, squares_into
from late.test_engine import on_device, reference, train
from support.configs import engine_config
from support.loops import Result, assert_close, assert_same, trained
from support.models import seeded

PARTS = [Part(0, 5000), Part(5120, 5130, copies=2), Part(5376, 20_000), Part(20_224, 20_300, in_norm=False)]


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu"), ("none", "none")])
@pytest.mark.parametrize("options", [{"clip": 0.5}, {"bf16": True}], ids=str)
def test_accumulates_as_on_the_cpu(order: None, param: str, optim: str, options: dict[str, float]) -> None:
    result, expected = train(param, optim, accumulation=3, **options), reference(accumulation=3, **options)
    if optim != "none":
        assert_same(result, expected)
    elif "bf16" in options:  # Adam rounds otherwise on the device, and bf16 rounds the difference up
        assert_close(result, expected, loss=1e-3, parameters=1e-3)
    else:
        assert_close(result, expected)


@pytest.mark.parametrize("count", [1, 31, 4096, 4097, 20_300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_squares_on_the_device_have_the_bits_of_the_host(lazy: None, dtype: torch.dtype, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    out = torch.empty(1, dtype=torch.float64, device=LateAccelerator().torch_device)
    squares_into(out, values.to(out.device), [(0, count)])
    assert out.item() == NATIVE.sum_of_squares(values)


STEPS: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 0.5},
    "without poison": {"clip": 0.5, "debug": False},  # it would wait for the sums and hide a missing wait
    "early": {"bf16": True, "update": "during_backward"},
    "accumulated": {"clip": 0.5, "accumulation": 3},  # of a later micro-batch, the host sums
    "fp16": {"fp16": {"initial_scale_power": 8}},
}


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("none", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_squares_that_the_device_sums_change_no_bit(
    order: None, monkeypatch: pytest.MonkeyPatch, param: str, optim: str, options: dict[str, Any]
) -> None:
    """A gradient leaves the device in one copy, without a pass on the host. Its norm clips, or is checked in fp16."""
    expected, sums = train(param, optim, **options), []

    def counted(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        sums.append(len(ranges))
        squares_into(out, values, ranges)

    monkeypatch.setattr("infinity.engine.platform.Machine.kernels", replace(EXACT, squares_into=counted))
    assert_same(train(param, optim, **options), expected)
    assert len(sums) >= 16


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme")])
def test_squares_are_summed_on_the_host_while_the_device_has_no_memory(
    order: None, monkeypatch: pytest.MonkeyPatch, param: str, optim: str
) -> None:
    refused = 0

    def some(out: torch.Tensor, values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        nonlocal refused
        refused += 1
        if refused % 3:
            raise torch.OutOfMemoryError("as in an allocation of scratch memory")
        squares_into(out, values, ranges)

    expected = train(param, optim, clip=0.5)
    monkeypatch.setattr("infinity.engine.platform.Machine.kernels", replace(EXACT, squares_into=some))
    assert_same(train(param, optim, clip=0.5), expected)
    assert refused > 20


def test_a_shard_without_a_part_in_the_norm_has_no_squares(lazy: None) -> None:
    device = LateAccelerator()
    squares = DeviceSquares(device, [Part(0, 5, in_norm=False)], EXACT)
    before = late.pending()
    assert squares.start(device.empty(64)).total() == 0.0 and late.pending() == before
    squares.close()


def test_a_norm_on_the_device_is_read_when_it_is_asked_for(lazy: None) -> None:
    device = LateAccelerator()
    shard = torch.randn(20_480).to(device.torch_device)
    expected = squared_norm(shard, PARTS)
    squares = DeviceSquares(device, PARTS, NATIVE)
    before = late.counters().waits
    first = squares.start(shard)
    assert late.counters().waits == before and late.pending() >= len(PARTS), "nothing was waited for"
    assert first.total() == expected
    waited = late.counters().waits
    assert first.total() == expected and late.counters().waits == waited
    second = squares.start(shard.mul_(2))
    squares.start(shard.mul_(2))
    assert (first.total(), second.total()) == (expected, 4 * expected)
    squares.close()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_norm_on_the_device_is_not_finite_if_the_gradient_is_not(order: None, value: float) -> None:
    device = LateAccelerator()
    host = torch.zeros(20_480)
    host[5125] = value
    squares = DeviceSquares(device, PARTS, NATIVE).start(host.to(device.torch_device))
    assert not squares.total() < torch.inf


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_gradient_lands_after_the_compute_that_made_it(lazy: None, tier: str) -> None:
    """The landing thread has a stream of its own, and so has the thread that updates."""
    bench = Bench(LateAccelerator(), tier)
    first, second = bench.gradients(2)
    there = [gradient.to(bench.device.torch_device) for gradient in (first, second)]
    bench.store.keep(bench.sent(there[0], last=False))
    landed = bench.store.land(bench.sent(there[1], last=True)).result(60)
    bench.device.await_copy(landed.reached)
    assert torch.equal(landed.shard.cpu(), first.float() + second)
    landed.release()
    bench.store.settle()
    bench.store.close()


@pytest.mark.parametrize("lands", [False, True], ids=["kept", "landed"])
def test_gradients_are_added_to_memory_of_the_device_that_is_not_reserved(order: None, lands: bool) -> None:
    """One buffer holds the stored part of each unit in turn, and nothing waits for the sums in between."""
    bench = Bench(LateAccelerator(), "device", passes=True)
    gradients = [bench.gradients(2) for _ in bench.units]
    there = [[gradient.to(bench.device.torch_device) for gradient in each] for each in gradients]
    for unit, (first, _) in zip(bench.units, there, strict=True):
        bench.store.keep(bench.sent(first, last=False, unit=unit))
    later = [bench.sent(second, last=True, unit=unit) for unit, (_, second) in zip(bench.units, there, strict=True)]
    if lands:
        for future, expected in zip([bench.store.land(sent) for sent in later], gradients, strict=True):
            landed = future.result(60)
            bench.device.await_copy(landed.reached)
            assert torch.equal(landed.shard.cpu(), expected[0] + expected[1])
            landed.release()
        bench.store.settle()
    else:
        for sent in later:
            bench.store.keep(sent)
        for unit, expected in zip(bench.units, gradients, strict=True):
            assert torch.equal(bench.store.read(unit), expected[0] + expected[1])
    bench.store.close()


def added_beside(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return x + shift, computed on a stream of its own."""
    if x.is_cpu:
        return x + shift
    stream, present = torch.Stream(x.device), torch.accelerator.current_stream()
    stream.wait_stream(present)
    with stream:
        shifted = x + shift
    present.wait_stream(stream)
    shifted.record_stream(present)
    return shifted


class Shifts(nn.Module):
    """(batch, 10) → mean square error of x. Backward uses no parameter, so that nothing else orders its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.randn(10) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.stack([added_beside(x, shift) for shift in self.shifts]).prod(0), x)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_gradients_of_a_unit_that_arrive_on_several_streams(order: None) -> None:
    """The first one to arrive clears the buffer for all."""
    inputs = [(torch.randn(4, 10, generator=torch.Generator().manual_seed(step)),) for step in range(3)]
    device, config = LateAccelerator(), engine_config("cpu", "cpu")
    result = trained(seeded(Shifts), on_device(inputs, device.torch_device), config, device)
    result = Result(result.losses, {name: value.cpu() for name, value in result.parameters.items()}, result.units)
    assert_close(result, trained(seeded(Shifts), inputs, config))
