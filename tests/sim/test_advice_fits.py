"""Advice of `infinity plan` on memory: with the changes that it plans, the model fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from infinity.config import Config
from infinity.sim.gpt2 import GPT2Config, PlannedModel, gpt2
from infinity.sim.machine import Machine
from infinity.sim.planner import Prediction, predict
from infinity.tier_kind import TierKind
from support.advice import DEVICE, VALUE, followed, merged
from support.configs import engine_config

SHAPE = GPT2Config(vocab_size=512, seq_length=16, num_layers=4, hidden_size=64, num_attention_heads=2)
OPTIONS: list[dict[str, Any]] = [
    {"unit_size": 1 << 16, "tile_size": 1 << 16},
    {"param": "cpu", "optim": "cpu", "unit_size": 1 << 16},
    {"bf16": True, "moments": "8bit", "clip": 1.0, "prefetch_bytes": "1MiB"},
]
UNPLANNED = ("checkpoint", "micro-batch", "infinity.activations", "smaller model")
"""Words of changes to the model, the batch and the machine, whose effect is estimated."""


def make() -> PlannedModel:
    return gpt2(SHAPE, None)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.2, 0.99), tier=st.sampled_from([TierKind.HOST, TierKind.DEVICE]))
def test_a_model_fits_with_the_changes_that_are_planned(
    options: dict[str, Any], gpus: int, share: float, tier: TierKind, tmp_path: Path
) -> None:
    content = engine_config(folder=tmp_path, debug=False, **options).model_dump()

    def predicted(content: dict[str, Any], machine: Machine) -> Prediction:
        return predict(make, Config.load(content), machine, None)

    roomy = Machine(host_memory=1 << 40, nvme=1 << 40, gpus=gpus, device_memory=gpus << 36)
    peak = predicted(content, roomy).needs.peak
    small = tier if gpus else TierKind.HOST
    sizes = {"host_memory": 1 << 40, "device_memory": gpus << 36}
    sizes[f"{small}_memory"] = int(share * peak[small])
    machine = Machine(nvme=1 << 40, gpus=gpus, **sizes)
    found = predicted(content, machine)
    assert found.needs.limits == [small]
    (advice,) = found.advice
    if any(word in advice for word in UNPLANNED):
        return
    assert VALUE.search(advice) or DEVICE.search(advice)
    changed = followed(content, advice, tmp_path)
    assert not predicted(changed, machine).needs.limits, advice
    assert Config.load(merged(content, found.to_json()["changed"])) == Config.load(changed), "its JSON does the same"
