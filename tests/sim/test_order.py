"""The simulated order of transfers is that of a real run, and so are their bytes."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.plan.policy import DeviceInfo
from infinity.sim.device import DeviceFacts
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sim.machine import Links
from infinity.sim.simulate import Simulation, simulate
from infinity.tiers.transfer import Transfer
from infinity.units.buffers import UnitBuffers
from infinity.units.unit import Unit
from support.configs import engine_config
from support.late_device import LateCopy, LateDevice
from support.recorded import Order, bytes_of, real_run, simulated_order

STEPS = 4
AT_ONCE = Links(
    nvme_read=1e30,
    nvme_write=1e30,
    nvme_mixed=1e30,
    memory=1e30,
    host_to_device=1e30,
    device_to_host=1e30,
    collective=None,
    flops={"float32": 1e9, "bfloat16": 1e9},
    baseline_rss=0,
    wakeup_latency=0,
    launch_overhead=0,
    unit_overhead=0,
)
"""Only the model takes time, as in `real_run`."""

TOKENS = torch.zeros(4, 17, dtype=torch.int64)
BATCH = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()


def model(*, checkpoints: bool) -> nn.Module:
    return GPT2(
        GPT2Config(
            vocab_size=96,
            seq_length=16,
            num_layers=6,
            hidden_size=64,
            num_attention_heads=4,
            checkpoint_activations=checkpoints,
        )
    )


def simulated(
    config: Config,
    *,
    checkpoints: bool,
    links: Links = AT_ONCE,
    device: DeviceFacts | None = None,
    train_batch: bool = False,
) -> Simulation:
    with torch.device("meta"):
        blank = model(checkpoints=checkpoints)
    return simulate(blank, config, links, batch=BATCH, steps=STEPS, device=device, train_batch=train_batch)


def assert_same(config: Config, *, checkpoints: bool, train_batch: bool = False) -> Order:
    """Compare a real run with a simulation. Returns the order of transfers."""
    real, moved, stored = real_run(model(checkpoints=checkpoints), config, BATCH, STEPS, whole=train_batch)
    found = simulated(config, checkpoints=checkpoints, train_batch=train_batch)
    order = simulated_order(found)
    assert order == real
    assert found.activations == stored
    assert bytes_of(order, "nvme_read") == moved.nvme_bytes_read
    assert bytes_of(order, "nvme_write") == moved.nvme_bytes_written
    assert bytes_of(order, "activations") == moved.activation_bytes_read + moved.activation_bytes_written
    return order


@pytest.mark.parametrize(
    "clip, accumulation, checkpoints, bf16",
    [(0.0, 1, False, False), (0.0, 2, False, False), (1.0, 1, True, True), (1.0, 2, True, False)],
)
@pytest.mark.parametrize(
    "param, optim", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu"), ("none", "nvme")]
)
def test_transfers_of_each_thread_and_lane_are_those_of_a_real_run(
    param: str, optim: str, clip: float, accumulation: int, checkpoints: bool, bf16: bool, tmp_path: Path
) -> None:
    config = engine_config(
        param, optim, folder=tmp_path, clip=clip, accumulation=accumulation, bf16=bf16, unit_size=60_000, debug=False
    )
    order = assert_same(config, checkpoints=checkpoints)
    assert order


@pytest.mark.parametrize("param, optim", [("nvme", "nvme"), ("cpu", "cpu")])
def test_updates_left_to_forward_move_states_as_in_a_real_run(param: str, optim: str, tmp_path: Path) -> None:
    config = engine_config(
        param, optim, folder=tmp_path, bf16=True, unit_size=60_000, debug=False, forward_updates=0.4, prefetch_bytes=0
    )
    order = assert_same(config, checkpoints=True)
    if optim == "nvme":
        stored = [name for name, _ in order["infinity-grads", "nvme_write"]]
        assert len(stored) > len({*stored})  # in later steps than the first, too


@pytest.mark.parametrize(
    "states, accumulation, checkpoints, memory_bytes",
    [("nvme", 1, False, 32_768), ("cpu", 2, False, 131_072), ("nvme", 2, True, 131_072), ("cpu", 1, True, 32_768)],
)
def test_saved_activations_move_to_nvme_and_back_as_in_a_real_run(
    states: str, accumulation: int, checkpoints: bool, memory_bytes: int, tmp_path: Path
) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": memory_bytes}
    config = engine_config(
        states, states, folder=tmp_path, accumulation=accumulation, unit_size=60_000, debug=False, activations=section
    )
    order = assert_same(config, checkpoints=checkpoints)
    assert min(len(order[f"infinity-staging-{name}", "activations"]) for name in ("writes", "reads")) > STEPS


@pytest.mark.parametrize("checkpoints, activations, clip", [(False, False, 0.0), (True, True, 100.0)])
def test_train_batch_moves_states_in_the_vertical_order_of_a_real_run(
    checkpoints: bool, activations: bool, clip: float, tmp_path: Path
) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": 131_072}
    config = engine_config(
        folder=tmp_path,
        accumulation=3,
        clip=clip,
        unit_size=60_000,
        debug=False,
        prefetch_bytes=220_000,  # a block
        activations=section if activations else {},
    )
    vertical = assert_same(config, checkpoints=checkpoints, train_batch=True)
    ordinary = simulated_order(simulated(config, checkpoints=checkpoints))
    read, in_a_loop = (
        sum(nbytes for name, nbytes in order["model", "nvme_read"] if name.startswith("parameters"))
        for order in (vertical, ordinary)
    )
    assert 0 < read < in_a_loop / 2.5


class PromptDevice(LateDevice):
    """A device with memory of its own, whose copies have ended when they are returned."""

    @property
    def info(self) -> DeviceInfo:
        return DeviceInfo("cuda", host_addressable=False, nbytes=1 << 30, processors=1)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Transfer | None = None) -> LateCopy:
        copied = super().copy(destination, source, after=after)
        copied.wait()
        return copied


@pytest.mark.parametrize("memory_bytes, checkpoints", [(32_768, True), (131_072, False)])
def test_saved_activations_move_to_host_memory_and_back_as_in_a_real_run(memory_bytes: int, checkpoints: bool) -> None:
    section = {"device": "cpu", "min_bytes": 512, "memory_bytes": memory_bytes}
    config = engine_config("cpu", "cpu", unit_size=60_000, debug=False, activations=section)
    real, moved, stored = real_run(model(checkpoints=checkpoints), config, BATCH, STEPS, PromptDevice())
    device = DeviceFacts(host_addressable=False, nbytes=1 << 30)
    links = replace(AT_ONCE, memory=inf, host_to_device=inf, device_to_host=inf, flops={"float32": inf})
    found = simulated(config, checkpoints=checkpoints, links=links, device=device)
    order, key = simulated_order(found), ("model", "activations")
    assert order[key] == real[key]
    assert found.activations == stored
    assert bytes_of(order, "activations") == moved.activation_bytes_read + moved.activation_bytes_written > 0


def test_a_changed_decision_of_the_store_changes_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(folder=tmp_path, unit_size=60_000, debug=False)
    before = simulated_order(simulated(config, checkpoints=True))
    victims = UnitBuffers.victims

    def nearest_first(buffers: UnitBuffers, unit: Unit) -> list[tuple[float, Unit]]:
        return victims(buffers, unit)[::-1]

    monkeypatch.setattr(UnitBuffers, "victims", nearest_first)
    after = assert_same(config, checkpoints=True)
    assert after != before
    assert bytes_of(after, "nvme_read") > bytes_of(before, "nvme_read")
