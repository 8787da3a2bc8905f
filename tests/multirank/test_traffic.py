"""Bandwidth-centric sharding: a rank's tiers hold its part of every unit; one all-gather, one reduce-scatter a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multirank import cases
from support.ranks import Group


def test_one_all_gather_and_one_reduce_scatter_a_unit(pair: Group, tmp_path: Path) -> None:
    """Where all stays in device buffers, a step gathers each unit once, after its update, and reduces it once."""
    for steps in pair.run(cases.traffic, folder=str(tmp_path), prefetch_bytes="1GiB"):
        whole = steps.pop()
        for step in steps[2:]:
            assert step["all_gathers"] == whole["units"]
            assert step["all_gather_bytes"] == whole["bytes"]
            assert step["reduce_scatters"] == whole["units"]
            assert step["reduce_scatter_bytes"] == whole["bytes"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_fetch_is_one_all_gather(pair: Group, accumulation: int, tmp_path: Path) -> None:
    """With few buffers units are fetched again for backward: no more collectives than that, alike on both ranks."""
    one, other = pair.run(cases.traffic, folder=str(tmp_path), prefetch_bytes=0, accumulation=accumulation)
    assert one == other
    whole = one.pop()
    for step in one[2:]:
        assert whole["units"] <= step["all_gathers"] <= 2 * whole["units"] * accumulation
        assert step["reduce_scatters"] == whole["units"] * accumulation
        assert step["reduce_scatter_bytes"] == whole["bytes"] * accumulation


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_gradients_leave_during_backward(pair: Group, update: str, tmp_path: Path) -> None:
    """A unit's gradient is reduced when backward moves on, from the third step on, which knows the order of units."""
    one, other = pair.run(cases.reduced_in_backward, folder=str(tmp_path), update=update)
    assert one == other
    assert one[2:] == [3, 3]


@pytest.mark.parametrize(("param", "optim"), [("nvme", "nvme"), ("cpu", "nvme"), ("none", "cpu")])
def test_every_rank_holds_its_part_of_every_unit(
    pair: Group, single: Group, param: str, optim: str, tmp_path: Path
) -> None:
    """Half of one rank's bytes, but for padding, in every tier and in every extent."""
    common: dict[str, Any] = {"folder": str(tmp_path), "param": param, "optim": optim}
    both = pair.run(cases.extents, **common)
    alone = single.run(cases.extents, **common)[0]
    assert both[0] == both[1]
    width = {"param": 4, "grad": 4, "optim": 8}
    for (unit, state), (tier, nbytes) in both[0]["extents"].items():
        whole_tier, whole = alone["extents"][unit, state]
        assert tier == whole_tier
        assert 0 <= 2 * nbytes - whole <= 2048 * width[state], "more than a block of padding"
    for tier, nbytes in both[0]["tiers"].items():
        assert nbytes < 0.75 * alone["tiers"][tier]
    for tier in ("nvme", "host") if param == "cpu" else ("nvme",):
        assert both[0]["held"][tier] < alone["held"][tier] or alone["held"][tier] == 0
