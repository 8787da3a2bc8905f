"""Machines that plans are made for."""

from __future__ import annotations

import pytest

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.sim.machine import Machine
from support.configs import engine_config


def test_each_gpu_has_a_rank() -> None:
    machine = Machine(host_memory=1 << 40, nvme=1 << 44, nodes=32, gpus=16, device_memory=32 << 30)
    config = Config.load({"train_batch_size": 512, "zero_optimization": {"stage": 3}})
    assert (machine.ranks, machine.ranks_per_node) == (512, 16)
    info = machine.rank_info(config)
    assert (info.size, info.shards, info.backend) == (512, 512, "nccl")
    device = machine.device_info(config)
    assert (device.type, device.host_addressable, device.nbytes) == ("cuda", False, 32 << 30)


def test_without_gpus_a_node_computes_in_host_memory() -> None:
    machine = Machine(host_memory=1 << 34, nodes=2)
    assert machine.rank_info(Config.load({"train_batch_size": 2, "zero_optimization": {"stage": 0}})).shards == 1
    device = machine.device_info(engine_config())
    assert (device.type, device.host_addressable, device.nbytes) == ("cpu", True, 0)


@pytest.mark.parametrize(("gpus", "host"), [(0, 1 << 33), (4, (7 << 31) - (1 << 30))])
def test_budgets_are_of_a_rank(gpus: int, host: int) -> None:
    machine = Machine(1 << 34, 1 << 40, gpus=gpus, device_memory=gpus and 1 << 34)
    budget = machine.budget(machine.resolved(engine_config(memory={"host": "auto", "nvme": 1 << 40})))
    assert (budget.host, budget.nvme) == (host // max(1, gpus), (1 << 40) // max(1, gpus))
    assert machine.budget(engine_config()).host is None


def test_gpus_without_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="give the memory of each of the"):
        Machine(1 << 34, gpus=8)


def test_this_machine_has_memory_and_a_drive(tmp_path: object) -> None:
    from pathlib import Path

    here = Machine.here(Path(str(tmp_path)) / "absent")
    assert here.host_memory > 1 << 28 and here.nvme > 0
    assert Machine.here().nvme == 0
