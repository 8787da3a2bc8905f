"""An engine on the late device trains to the bits of an engine on the CPU, in every order of execution."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import late
from infinity.errors import NonFiniteError
from infinity.tiers.accelerator import AcceleratorDevice, StreamTransfer
from infinity.tiers.transfer import DONE, Transfer
from infinity.update.kernels import NATIVE
from late.device import LateAccelerator
from support.configs import PLACEMENTS, engine_config
from support.loops import (
    Batches,
    Result,
    assert_close,
    assert_same,
    open_engine,
    parameters_of,
    train as train_engine,
    trained,
)
from support.models import Stack, seeded, token_batches

BATCHES = token_batches(6)
REFERENCES: dict[tuple[Any, ...], Result] = {}


def reference(**options: Any) -> Result:
    """The result on the CPU, where every placement has the same."""
    key = tuple(options.items())
    if key not in REFERENCES:
        REFERENCES[key] = trained(seeded(Stack), BATCHES, engine_config(prefetch_bytes=20_000, **options))
    return REFERENCES[key]


def on_device(batches: Batches, device: torch.device) -> Batches:
    return [tuple(tensor.to(device) for tensor in batch) for batch in batches]


def train(param: str, optim: str, index: int = 0, **options: Any) -> Result:
    device = LateAccelerator(index)
    config = engine_config(param, optim, prefetch_bytes=20_000, **options)
    result = trained(seeded(Stack), on_device(BATCHES, device.torch_device), config, device)
    return Result(result.losses, {name: value.cpu() for name, value in result.parameters.items()}, result.units)


@pytest.mark.parametrize("param, optim", PLACEMENTS)
def test_trains_as_on_the_cpu(order: None, param: str, optim: str) -> None:
    # Moments on the device are updated by torch's operators, whose rounding is another than the optimizer kernels'.
    (assert_close if optim == "none" else assert_same)(train(param, optim), reference())


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"bf16": True, "accumulation": 2}], ids=str)
@pytest.mark.parametrize("memory", [{"device_optimizer": 0.5}, {"device": 400_000}, {"device": 1 << 30}], ids=str)
def test_trains_with_a_part_of_the_states_on_the_device(
    order: None, memory: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if torch's operators, which update on this device, gave the host's bits: else a budget places nothing."""
    if "device" in memory:
        assert_same(train("cpu", "cpu", memory=memory, **options), reference(**options))
        monkeypatch.setattr("infinity.engine.platform.Platform.kernels", replace(NATIVE, is_exact=lambda kind: True))
    assert_close(train("cpu", "cpu", memory=memory, **options), reference(**options))


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=str)
def test_states_fill_the_memory_that_steps_leave(
    order: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the key that the log names, the peak grows by the bytes that the plan has more, and by no others."""
    monkeypatch.setattr("infinity.engine.platform.Platform.kernels", replace(NATIVE, is_exact=lambda kind: True))
    device, limit, peaks, planned = LateAccelerator(), 2_600_000, [], []
    memory = {"device": limit, "device_states": 700_000}
    try:
        for _ in range(2):
            gc.collect()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            late.set_limit(0, limit)
            config = engine_config("cpu", "cpu", prefetch_bytes=20_000, unit_size=4096, memory=memory, **options)
            with open_engine(seeded(lambda: Stack(depth=12)), config, device) as engine:
                train_engine(engine, on_device(BATCHES[:4], device.torch_device))
                planned.append(engine.parts.plan.peak_nbytes()["device"])
                peaks.append(torch.accelerator.max_memory_reserved())
                found = re.search(r"set infinity\.memory\.device_states to (\d+)", engine.ledger.spare())
                memory |= {"device_states": int(found[1])} if found else {}
            del engine
    finally:
        late.set_limit(0, None)
    unused = limit - peaks[0]
    assert planned[1] - planned[0] > unused // 2 and planned[1] <= memory["device_states"]
    assert abs(peaks[1] - peaks[0] - (planned[1] - planned[0])) < 100_000, "when a buffer is freed depends on the order"
    assert peaks[1] <= limit


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_trains_so_with_options(order: None, bf16: bool, clip: float, accumulation: int) -> None:
    options = {"bf16": bf16, "clip": clip, "accumulation": accumulation}
    assert_same(train("nvme", "cpu", **options), reference(**options))


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme")])
def test_trains_on_a_device_that_is_not_the_helper_threads_current_one(order: None, param: str, optim: str) -> None:
    with torch.accelerator.device_index(1):
        assert_same(train(param, optim, index=1), reference())


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "none"), ("none", "cpu")])
def test_trains_on_a_stream_of_the_user(order: None, param: str, optim: str) -> None:
    with torch.Stream("late:0"):
        (assert_close if optim == "none" else assert_same)(train(param, optim), reference())


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme")])
def test_trains_on_another_stream_each_step(order: None, param: str, optim: str) -> None:
    """Streams of the user's that nothing else orders: the engine orders what each does with its parameters."""
    device = LateAccelerator()
    batches = on_device(BATCHES, device.torch_device)
    torch.accelerator.synchronize()
    losses = []
    with open_engine(seeded(Stack), engine_config(param, optim, prefetch_bytes=20_000), device) as engine:
        for batch in batches:
            with torch.Stream(device.torch_device):
                loss = engine(*batch)
                engine.backward(loss)
            with torch.Stream(device.torch_device):
                engine.step()
            losses.append(float(loss))
        values = {name: value.cpu() for name, value in parameters_of(engine).items()}
    assert_same(Result(losses, values, reference().units), reference())


@pytest.mark.parametrize("param", ["cpu", "nvme", "none"])
def test_forwards_on_streams_of_their_own(order: None, param: str) -> None:
    """A unit's buffer is filled again only after the kernels that read it, on whatever stream those were queued."""
    with open_engine(seeded(Stack), engine_config(prefetch_bytes=20_000)) as engine, torch.no_grad():
        expected = [float(engine(*batch)) for batch in BATCHES]
    device = LateAccelerator()
    batches = on_device(BATCHES, device.torch_device)
    torch.accelerator.synchronize()
    losses = []
    with open_engine(seeded(Stack), engine_config(param, prefetch_bytes=20_000), device) as engine, torch.no_grad():
        for batch in batches:
            with torch.Stream(device.torch_device):
                losses.append(engine(*batch))
        torch.accelerator.synchronize()
        assert [float(loss) for loss in losses] == expected


def test_a_resident_unit_is_used_on_another_stream(lazy: None) -> None:
    """The copy of its parameters was awaited by the stream that used it first."""
    config = engine_config("cpu", prefetch_bytes=1 << 20)
    with open_engine(seeded(Stack), config) as engine, torch.no_grad():
        expected = float(engine(*BATCHES[0]))
    device = LateAccelerator()
    (batch,) = on_device(BATCHES[:1], device.torch_device)
    torch.accelerator.synchronize()
    with open_engine(seeded(Stack), config, device) as engine, torch.no_grad():
        with torch.Stream(device.torch_device):
            engine(*batch)
        with torch.Stream(device.torch_device):
            assert float(engine(*batch)) == expected


class Slopes(nn.Module):
    """(batch, 8) → mean square error of x and of the slope of a checkpointed energy, computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        point = x.detach().requires_grad_()
        energy = checkpoint(self.energy, point, use_reentrant=False).sum()
        (slope,) = torch.autograd.grad(energy, point, create_graph=True)
        return F.mse_loss(self.out(slope), x)


@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_recomputation_in_a_backward_of_the_forward(order: None, param: str) -> None:
    """autograd's thread for the device recomputes, while the forward that called it has the model's scope open."""
    inputs = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)),) for step in range(4)]
    device = LateAccelerator()
    config = engine_config(param, "cpu", unit_size=2048, prefetch_bytes=4000)
    expected = trained(seeded(Slopes), inputs, config)
    result = trained(seeded(Slopes), on_device(inputs, device.torch_device), config, device)
    assert_same(Result(result.losses, {name: value.cpu() for name, value in result.parameters.items()}), expected)


# -- removed waits -----------------------------------------------------------------------------------------------------


def _no_wait(*arguments: Any) -> None:
    pass


def _copy_at_once(device: AcceleratorDevice, target: torch.Tensor, source: torch.Tensor, **after: Any) -> Transfer:
    if target.is_cpu and source.is_cpu:
        target.copy_(source)
        return DONE
    stream = device._from_device if target.is_cpu else device._to_device
    with stream:
        target.copy_(source, non_blocking=True)
    return StreamTransfer(stream)


_copy = AcceleratorDevice.copy


def _copy_after_own_work(
    device: AcceleratorDevice, target: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None
) -> Transfer:
    return _copy(device, target, source)


@pytest.mark.parametrize(
    "owner, name, without",
    [
        (AcceleratorDevice, "await_copy", _no_wait),  # compute before its parameters have arrived
        (AcceleratorDevice, "copy", _copy_at_once),  # copies before the compute that wrote the source
        (AcceleratorDevice, "copy", _copy_after_own_work),  # copies before the compute of another thread
        (AcceleratorDevice, "compute_reached", lambda device: DONE),  # the same
        (StreamTransfer, "wait", _no_wait),  # the host before a gradient has arrived
    ],
    ids=["await_copy", "copy", "after", "compute_reached", "wait"],
)
def test_a_wait_that_is_missing_shows(
    lazy: None, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, without: Any
) -> None:
    monkeypatch.setattr(owner, name, without)
    # `close` frees memory after this wait, which the sabotage may remove, too.
    monkeypatch.setattr(AcceleratorDevice, "finish", lambda device: late.drain())
    with pytest.raises((NonFiniteError, AssertionError)):
        assert_same(train("cpu", "cpu"), reference())


def test_compute_that_stands_still_for_copies_is_measured(lazy: None) -> None:
    """The ledger counts it with the time for which the model's thread waited."""
    device = LateAccelerator()
    with open_engine(seeded(Stack), engine_config("cpu", "cpu", prefetch_bytes=20_000), device) as engine:
        for batch in on_device(BATCHES, device.torch_device):
            engine.backward(engine(*batch))
            engine.step()
        torch.accelerator.synchronize()
        waits = engine.ledger.waits()
        assert waits["parameters"].stood_still > 0
        assert engine.ledger.snapshot().wait_seconds == pytest.approx(sum(one.stood_still for one in waits.values()))


@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme")])
def test_a_profile_has_the_times_of_streams(order: None, tmp_path: Path, param: str, optim: str) -> None:
    """Copies, compute and stalls are timed by events. The bits are those without a profile."""
    device, file = LateAccelerator(), tmp_path / "trace.json"
    config = engine_config(param, optim, prefetch_bytes=20_000)
    with open_engine(seeded(Stack), config, device) as engine:
        for number, batch in enumerate(on_device(BATCHES, device.torch_device)):
            if number == 2:
                engine.profile(2, file)
            engine.backward(engine(*batch))
            engine.step()
        trained_on = {name: value.cpu() for name, value in parameters_of(engine).items()}
    assert_same(Result(reference().losses, trained_on), reference())
    trace = json.loads(file.read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {lanes[event["tid"]] for event in work if event["dur"] > 0}
    assert {"compute", "host_to_device", "device_to_host", "update", "reduce"} <= found
    whole = sum(step["seconds"] for step in trace["otherData"]["steps"])
    assert all(sum(step["exposed"].values()) <= step["seconds"] * 1.01 for step in trace["otherData"]["steps"])
    assert max(event["ts"] + event["dur"] for event in work) <= whole * 1e6 + 1


@pytest.mark.parametrize("dropped", [False, True])
def test_an_engine_that_ends_in_mid_forward_leaves_no_copy_behind(lazy: None, dropped: bool) -> None:
    """A copy ahead would fill memory that the next program has, from memory that is unmapped."""
    device = LateAccelerator()
    engine = open_engine(seeded(Stack), engine_config("cpu", "cpu", prefetch_bytes=20_000), device)
    batches = on_device(BATCHES, device.torch_device)
    for batch in batches[:2]:
        engine.backward(engine(*batch))
        engine.step()
    engine.settle()
    handle = engine.module.blocks[0].register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine(*batches[2])
    handle.remove()
    counters = late.counters()
    assert counters.copies_queued > counters.copies_executed, "nothing is under way"
    if not dropped:
        engine._broken = "of a test"
        engine.close()
    del engine, handle
    gc.collect()
    counters = late.counters()
    assert counters.copies_queued == counters.copies_executed
