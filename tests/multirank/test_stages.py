"""The stages of ZeRO: the same training, with more or less of it sharded, and the bytes that each promises to move."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import cases
from multirank.test_ranks import STEPS, assert_bits, mean
from support.cover import pairwise_cover
from support.ranks import Group

EVERY = list(product([0, 1, 2], [False, True], [(1, 0.0), (1, 0.3), (3, 0.0), (3, 0.3)], ["none", "cpu", "nvme"]))


@pytest.mark.parametrize(("stage", "bf16", "micro_batches", "optim"), pairwise_cover(EVERY))
def test_two_ranks_train_as_in_stage_3(
    pair: Group, stage: int, bf16: bool, micro_batches: tuple[int, float], optim: str, tmp_path: Path
) -> None:
    """Bit for bit without accumulation. With it, stages 0 and 1 sum over micro-batches before they sum over ranks."""
    accumulation, clip = micro_batches
    common: dict[str, Any] = {"folder": str(tmp_path), "bf16": bf16, "accumulation": accumulation, "clip": clip}
    found = pair.run(cases.training, ranks=2, steps=STEPS, param="none", optim=optim, stage=stage, **common)
    expected = pair.run(cases.training, ranks=2, steps=STEPS, param="none", optim="none", **common)
    assert_bits(found[0], found[1])
    if clip:
        assert found[0]["norms"] == pytest.approx(expected[0]["norms"], rel=1e-6 if accumulation > 1 else 1e-12)
    if accumulation == 1 or stage == 2:
        assert [outcome["losses"] for outcome in found] == [outcome["losses"] for outcome in expected]
        assert_bits(found[0], expected[0])
    else:
        assert mean(found) == pytest.approx(mean(expected), rel=2**-9 if bf16 else 1e-6)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic(pair: Group, stage: int, accumulation: int, tmp_path: Path) -> None:
    """Each unit is reduced once a step where its gradient stays whole, else once a micro-batch, and gathered once."""
    options: dict[str, Any] = {"param": "none", "optim": "none", "prefetch_bytes": "1GiB"}
    for steps in pair.run(cases.traffic, folder=str(tmp_path), stage=stage, accumulation=accumulation, **options):
        whole = steps.pop()
        times = accumulation if stage >= 2 else 1
        for step in steps[2:]:
            assert step["all_reduces"] == (whole["units"] if stage == 0 else 0)
            assert step["all_reduce_bytes"] == (whole["bytes"] if stage == 0 else 0)
            assert step["reduce_scatters"] == (0 if stage == 0 else whole["units"] * times)
            assert step["reduce_scatter_bytes"] == (0 if stage == 0 else whole["bytes"] * times)
            assert step["all_gathers"] == (0 if stage == 0 else whole["units"])
            assert step["all_gather_bytes"] == (0 if stage == 0 else whole["bytes"])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_rank_holds(pair: Group, stage: int, tmp_path: Path) -> None:
    """Optimizer states whole in stage 0, halved from stage 1 on; parameters whole below stage 3."""
    common: dict[str, Any] = {"folder": str(tmp_path), "param": "none", "optim": "cpu"}
    sharded = pair.run(cases.extents, **common)[0]["extents"]
    found = pair.run(cases.extents, stage=stage, **common)[0]["extents"]
    for (unit, state), (tier, nbytes) in found.items():
        assert tier == sharded[unit, state][0]
        # Less the padding that two shards have and one has not.
        whole = 2 * sharded[unit, state][1] if stage == 0 else sharded[unit, state][1]
        assert whole - 2 * 2048 * 8 <= nbytes <= whole


@pytest.mark.parametrize(("stage", "other"), [(0, 3), (2, 0), (3, 1)])
def test_checkpoints_go_from_stage_to_stage(pair: Group, stage: int, other: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "directory": str(tmp_path / "saved"), "param": "none"}
    saved = pair.run(cases.save, steps=3, stage=stage, **options)
    loaded = pair.run(cases.load, stage=other, **options)
    for one, two in zip(saved, loaded, strict=True):
        assert_bits({"values": one}, {"values": two})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_overflow_and_recovery(pair: Group, stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "stage": stage, "param": "none", "optim": "cpu"}
    fp16 = pair.run(cases.training, ranks=2, steps=6, fp16={"initial_scale_power": 20}, accumulation=2, **options)
    assert fp16[0]["skipped"] == fp16[1]["skipped"] > 0
    assert_bits(fp16[0], fp16[1])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_see_the_same_and_change_it_together(pair: Group, stage: int, tmp_path: Path) -> None:
    one, other = pair.run(cases.accessed, folder=str(tmp_path), stage=stage)
    assert_bits(one, other)
    values = one["values"]
    # A 16-bit value that was 0.125 before is not seen to change, and its master stays what it was.
    assert values["param"].to(torch.bfloat16).eq(0.125).all() and values["param"].eq(0.125).float().mean() > 0.99
    assert torch.allclose(values["exp_avg"], torch.tensor(0.1), rtol=1e-6)
    assert values["grad"].any() and not values["grad"].isnan().any()
