"""The simulated order of transfers is that of a real run, and so are their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.gpt2.model import GPT2, GPT2Config
from infinity.sim.links import Links
from infinity.sim.simulate import Simulation, simulate
from infinity.units.buffers import UnitBuffers
from infinity.units.unit import Unit
from support.configs import engine_config
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


def simulated(config: Config, *, checkpoints: bool, links: Links = AT_ONCE) -> Simulation:
    with torch.device("meta"):
        blank = model(checkpoints=checkpoints)
    return simulate(blank, config, links, batch=BATCH, steps=STEPS)


def assert_same(config: Config, *, checkpoints: bool) -> Order:
    """Compare a real run with a simulation. Returns the order of transfers."""
    real, moved = real_run(model(checkpoints=checkpoints), config, BATCH, STEPS)
    order = simulated_order(simulated(config, checkpoints=checkpoints))
    assert order == real
    assert bytes_of(order, "nvme_read") == moved.nvme_bytes_read
    assert bytes_of(order, "nvme_write") == moved.nvme_bytes_written
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
