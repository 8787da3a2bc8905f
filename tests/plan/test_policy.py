"""Policy of a config: dtypes of gradients, and their dependence on the backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from infinity.config import Config
from infinity.plan.placement import DISK_TILE, WHOLE_SHARD
from infinity.plan.policy import DeviceInfo, RankInfo, policy, updated_in_forward
from infinity.tier_kind import TierKind

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("backend", "stage", "accumulation", "given", "expected"),
    [
        ("", 3, 1, {}, (BF16, BF16, BF16)),
        ("", 3, 1, {"communication_data_type": "fp32"}, (BF16, BF16, BF16)),
        ("", 3, 4, {}, (BF16, BF16, FP32)),
        ("", 3, 4, {"data_types": {"grad_accum_dtype": "bf16"}}, (BF16, BF16, BF16)),
        ("", 0, 4, {}, (FP32, FP32, FP32)),
        ("", 1, 4, {"data_types": {"grad_accum_dtype": "bf16"}}, (BF16, BF16, BF16)),
        ("gloo", 3, 1, {}, (FP32, FP32, FP32)),
        ("gloo", 3, 4, {}, (FP32, FP32, FP32)),
        ("gloo", 1, 4, {}, (FP32, FP32, FP32)),
        ("gloo", 3, 4, {"communication_data_type": "bf16"}, (BF16, BF16, FP32)),
        ("gloo", 1, 4, {"communication_data_type": "bf16"}, (FP32, BF16, BF16)),
        ("gloo", 0, 4, {"data_types": {"grad_accum_dtype": "bf16"}}, (BF16, FP32, FP32)),
        ("nccl", 3, 1, {}, (BF16, BF16, BF16)),
        ("nccl", 2, 1, {"data_types": {"grad_accum_dtype": "fp32"}}, (BF16, BF16, BF16)),
        ("nccl", 2, 4, {}, (BF16, BF16, FP32)),
        ("nccl", 1, 4, {}, (FP32, BF16, BF16)),
        ("nccl", 2, 4, {"communication_data_type": "float32"}, (FP32, FP32, FP32)),
    ],
)
def test_gradients_of_bf16(
    backend: str, stage: int, accumulation: int, given: dict[str, Any], expected: tuple[torch.dtype, ...]
) -> None:
    """`expected` is (collected, reduced, stored)."""
    config = Config.load({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **given})
    ranks = RankInfo(2 if backend else 1, backend=backend)
    assert policy(config, accumulation, ranks, DeviceInfo()).grads(BF16) == expected


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_of_one_has_the_gradients_of_no_group(backend: str, accumulation: int, stage: int) -> None:
    """Trainers join a group of one rank, and `infinity plan` plans none."""
    config = Config.load({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}})
    found = (policy(config, accumulation, RankInfo(backend=name), DeviceInfo()).grads(BF16) for name in (backend, ""))
    assert len({*found}) == 1


def test_the_default_on_nccl_is_what_the_parameters_are_in() -> None:
    ranks = RankInfo(2, backend="nccl")
    grads = policy(Config.load({}), 4, ranks, DeviceInfo()).grads
    assert [grads(dtype).reduced for dtype in (FP32, BF16, FP16)] == [FP32, BF16, FP16]
    assert {grads(dtype).stored for dtype in (FP32, BF16, FP16)} == {FP32}


@pytest.mark.parametrize(("device", "tile"), [("none", WHOLE_SHARD), ("cpu", WHOLE_SHARD), ("nvme", DISK_TILE)])
def test_tiles_in_memory_are_whole_units(device: str, tile: int, tmp_path: Path) -> None:
    """An explicit size holds for every tier."""
    folder = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    content = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": device, **folder}},
    }
    alone = 1, RankInfo(), DeviceInfo()
    assert policy(Config.load(content), *alone).tile_of(TierKind.of_config(device)) == tile
    assert policy(Config.load({**content, "infinity": {"tile_size": 8192}}), *alone).tile_size == 8192


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1), st.floats(0, 1))
def test_units_that_the_next_forward_updates(units: list[tuple[int, bool]], share: float) -> None:
    """They have the share of the trained elements of any first units, or up to one unit less."""
    layouts: Any = [
        SimpleNamespace(index=i, numel=numel, trainable=trained) for i, (numel, trained) in enumerate(units)
    ]
    chosen = updated_in_forward(layouts, share)
    largest = max(numel for numel, _ in units)
    for count in range(1, len(units) + 1):
        trained = [layout for layout in layouts[:count] if layout.trainable]
        total, left = (
            sum(each.numel for each in some) for some in (trained, [u for u in trained if u.index in chosen])
        )
        assert left <= share * total + 1e-9
        assert left > share * total - largest - sum(numel for numel, _ in units) * 1e-9 or not trained
    assert all(layouts[index].trainable for index in chosen)
    assert share < 1 or chosen == {layout.index for layout in layouts if layout.trainable}
