"""Steps of `engine.train_batch` on the late device have the bits of a loop on the CPU, in every order of execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from late.device import LateAccelerator
from support.configs import engine_config
from support.loops import Result, open_engine, parameters_of, trained
from support.models import Stack, seeded, token_batches

STEPS, MICRO_BATCHES = 4, 3
BATCHES = token_batches(STEPS * MICRO_BATCHES)


def tied() -> Stack:
    return Stack(tied=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True, "clip": 0.5},
        {"accumulated_in": "bf16"},
        {"activations": {"device": "cpu", "min_bytes": 1}},
    ],
)
@pytest.mark.parametrize("param, optim", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")])
def test_trains_as_in_a_loop(order: None, param: str, optim: str, options: dict[str, Any]) -> None:
    device = LateAccelerator()
    config = engine_config(param, optim, prefetch_bytes=20_000, accumulation=MICRO_BATCHES, unit_size=20_000, **options)
    batches = iter([tuple(tensor.to(device.torch_device) for tensor in batch) for batch in BATCHES])
    with open_engine(seeded(tied), config, device) as engine:
        losses = [engine.train_batch(batches, blocks=engine.module.blocks) for _ in range(STEPS)]
        found = {name: value.cpu() for name, value in parameters_of(engine).items()}
        means = [loss.item() for loss in losses]
        assert not engine._batches.reason
    expected: Result = trained(seeded(tied), BATCHES, config)
    for step, mean in enumerate(means):
        of_step = [torch.tensor(loss) for loss in expected.losses[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]]
        assert mean == ((of_step[0] + of_step[1] + of_step[2]) / MICRO_BATCHES).item()
    for name, value in expected.parameters.items():
        assert torch.equal(value, found[name]), name
