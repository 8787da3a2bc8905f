"""Dtypes of gradient sums over ranks and micro-batches: bit-identical to plain sums with the same roundings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from multirank import cases, dtype_cases
from multirank.dtype_cases import Sums
from multirank.test_ranks import assert_bits
from support.cover import pairwise_cover
from support.ranks import Group


def matrix() -> Iterator[Any]:
    """Everything with everything (fp16 needs the loss scale of fp16 training); a pairwise cover is not slow.

    Tiers and devices, which change no bit, take turns.
    """
    names = ["fp32", "bf16", "fp16"]
    every = [
        case for case in product(names, names, names, [0, 1, 2, 3], [1, 4]) if case[0] == "fp16" or "fp16" not in case
    ]
    cover = pairwise_cover(every)
    places = cycle(product(["none", "cpu", "nvme"], [False, True]))
    for case in [*cover, *(case for case in every if case not in cover)]:
        optim, late = next(places)
        marks = [] if case in cover else [pytest.mark.slow]
        yield pytest.param(Sums(*case), optim, late, marks=marks, id="-".join(map(str, (*case, optim, late))))


@pytest.mark.parametrize(("sums", "optim", "late"), list(matrix()))
def test_sums_are_rounded_where_the_config_says(
    pair: Group, sums: Sums, optim: str, late: bool, tmp_path: Path
) -> None:
    """Gradients bit for bit; their norm, and the fp32 masters after torch's AdamW took the same gradients."""
    for found in pair.run(
        dtype_cases.compared, ranks=2, steps=2, folder=str(tmp_path), sums=sums, optim=optim, late=late
    ):
        assert found["differ"] == []
        assert found["norms"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["apart"] < 1e-6


OTHERS: list[dict[str, Any]] = [
    {"param": "cpu", "optim": "cpu"},
    {"param": "nvme", "optim": "nvme"},
    {"update": "next_forward"},
    {"update": "after_backward", "optim": "nvme"},
    {"late": True, "optim": "cpu"},
    {"late": True, "optim": "none", "update": "next_forward"},
    {"prefetch_bytes": 0, "param": "nvme", "optim": "nvme", "adam_threads": 2, "tile_size": 8192},
]


def others() -> Iterator[Any]:
    """All of OTHERS for every case are slow; one of them for each is not, all in turn."""
    cases_ = product([("bf16", "fp32"), ("fp32", "bf16")], [1, 3], [1, 3])
    for number, ((communication, accumulated_in), stage, accumulation) in enumerate(cases_):
        case = communication, accumulated_in, stage, accumulation
        one = [OTHERS[number % len(OTHERS)]]
        name = "-".join(map(str, case))
        yield pytest.param(*case, one, id=f"{name}-one")
        yield pytest.param(*case, OTHERS, id=f"{name}-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("communication", "accumulated_in", "stage", "accumulation", "placed"), list(others()))
def test_where_and_when_changes_no_bit(
    pair: Group,
    communication: str,
    accumulated_in: str,
    stage: int,
    accumulation: int,
    placed: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Tiers, schedules, a late device: also with sums that are in another dtype than what was reduced.

    8-bit moments: padding shares their scales, so that what is in it shows.
    """
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "folder": str(tmp_path), "bf16": True, "moments": "8bit"}
    common |= {"stage": stage}
    common |= {"communication": communication, "accumulated_in": accumulated_in, "accumulation": accumulation}
    reference = pair.run(cases.training, **common, param="none", optim="none")
    assert_bits(reference[0], reference[1])
    assert sum(reference[0]["losses"]) == sum(reference[0]["losses"])
    for other in placed:
        if stage < 3:
            other = other | {"param": "none"}
        found = pair.run(cases.training, **{"param": "none", "optim": "none", **common, **other})
        assert [outcome["losses"] for outcome in found] == [outcome["losses"] for outcome in reference], other
        assert_bits(found[0], reference[0])


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bits_are_half_the_bytes(pair: Group, stage: int, accumulation: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"param": "none", "optim": "none", "prefetch_bytes": "1GiB", "stage": stage}
    for steps in pair.run(
        cases.traffic, folder=str(tmp_path), communication="bf16", accumulation=accumulation, **options
    ):
        whole = steps.pop()
        times = accumulation if stage >= 2 else 1
        for step in steps[2:]:
            assert 2 * step["all_reduce_bytes"] == (whole["bytes"] if stage == 0 else 0)
            assert 2 * step["reduce_scatter_bytes"] == (0 if stage == 0 else whole["bytes"] * times)
            assert step["all_gather_bytes"] == (0 if stage == 0 else whole["bytes"])


@pytest.mark.parametrize(
    ("communication", "accumulated_in", "stage", "accumulation", "width"),
    [
        (None, "fp32", 3, 1, 4),
        ("bf16", "fp32", 3, 1, 2),
        ("bf16", "fp32", 3, 2, 4),
        ("fp32", "bf16", 3, 2, 2),
        ("bf16", "fp32", 1, 2, 2),
        ("fp32", "bf16", 1, 2, 4),
    ],
)
def test_a_tier_holds_what_is_stored(
    pair: Group, communication: str, accumulated_in: str, stage: int, accumulation: int, width: int, tmp_path: Path
) -> None:
    """Parameters are fp32: sums over micro-batches are stored as such, and what came of the last reduction as that."""
    options: dict[str, Any] = {"communication": communication, "accumulated_in": accumulated_in, "stage": stage}
    for found in pair.run(
        cases.extents, folder=str(tmp_path), param="none", optim="nvme", accumulation=accumulation, **options
    ):
        units = {unit for unit, _ in found["extents"]}
        for unit in units:
            assert found["extents"][unit, "grad"][1] == found["extents"][unit, "param"][1] // 4 * width


@pytest.mark.parametrize(
    "sums",
    [
        Sums("bf16", "bf16", "fp32", 3, 1),
        Sums("bf16", "fp32", "fp32", 3, 3),
        Sums("fp32", "bf16", "bf16", 3, 3),
        Sums("fp16", "fp16", "fp16", 1, 3),
    ],
    ids=str,
)
def test_one_rank_exchanges_nothing(sums: Sums, tmp_path: Path) -> None:
    """Without a process group gradients are collected as they are summed over micro-batches, or as they come."""
    options: dict[str, Any] = {"ranks": 1, "steps": 2, "folder": str(tmp_path), "optim": "nvme", "late": False}
    found = dtype_cases.compared(0, sums=sums, **options)
    assert found["differ"] == []
    assert found["norms"] == pytest.approx(found["expected"], rel=1e-12)
