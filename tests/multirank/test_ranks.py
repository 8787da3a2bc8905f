"""Two ranks train as one that accumulates, bit for bit, whatever the knobs. See test_matrix.py for the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import cases
from support.ranks import Group

STEPS = 4

Outcome = dict[str, Any]


def mean(outcomes: list[Outcome]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(o["losses"] for o in outcomes), strict=True)]


def assert_bits(one: Outcome, other: Outcome) -> None:
    assert one["values"].keys() == other["values"].keys()
    for name, value in one["values"].items():
        assert torch.equal(value, other["values"][name]), name


def apart(one: Outcome, other: Outcome) -> float:
    """‖Δp‖ / ‖p‖ over all parameters."""
    names = [name for name in one["values"] if "/" not in name]
    difference = sum(float((one["values"][n].double() - other["values"][n].double()).square().sum()) for n in names)
    total = sum(float(other["values"][n].double().square().sum()) for n in names)
    return float((difference / total) ** 0.5)


@pytest.mark.parametrize(("param", "optim"), [("none", "none"), ("nvme", "nvme")])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_two_ranks_are_one_that_accumulates(
    pair: Group, param: str, optim: str, clip: float, bf16: bool, tmp_path: Path
) -> None:
    """Bit for bit: both sum two halves of the batch in fp32, and halving is exact. Only the norm is summed in another
    order, in fp64.
    """
    common: dict[str, Any] = {"folder": str(tmp_path), "bf16": bf16, "clip": clip}
    outcomes = pair.run(cases.training, ranks=2, steps=STEPS, param=param, optim=optim, **common)
    expected = cases.one_rank(STEPS, 2, accumulated=True, **common)
    assert mean(outcomes) == expected["losses"]
    assert_bits(outcomes[0], outcomes[1])
    assert_bits(outcomes[0], expected)
    if clip:
        assert outcomes[0]["norms"] == pytest.approx(expected["norms"], rel=1e-12)


@pytest.mark.parametrize(("moments", "master"), [("bf16", "remainder"), ("8bit", "remainder"), ("8bit", "fp32")])
def test_moments_are_rounded_alike_on_any_number_of_ranks(
    pair: Group, moments: str, master: str, tmp_path: Path
) -> None:
    """Bit for bit: what is rounded stochastically does not depend on who owns it."""
    common: dict[str, Any] = {"folder": str(tmp_path), "bf16": True, "moments": moments, "master": master}
    outcomes = pair.run(cases.training, ranks=2, steps=STEPS, **common)
    expected = cases.one_rank(STEPS, 2, accumulated=True, **common)
    assert mean(outcomes) == expected["losses"]
    assert_bits(outcomes[0], outcomes[1])
    assert_bits(outcomes[0], expected)


def test_ranks_skip_the_same_steps(pair: Group, tmp_path: Path) -> None:
    """fp16 with a first scale that is too large: whichever rank overflows, all skip the step."""
    options: dict[str, Any] = {"folder": str(tmp_path), "fp16": {"initial_scale_power": 20}}
    one, other = pair.run(cases.training, ranks=2, steps=2 * STEPS, **options)
    assert one["skipped"] == other["skipped"] > 1
    assert_bits(one, other)
    assert mean([one, other])[-1] < mean([one, other])[0]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("update", ["during_backward", "after_backward", "next_forward"])
def test_knobs(pair: Group, bf16: bool, update: str, tmp_path: Path) -> None:
    """Update schedules, prefetch and a device that is late, by another time on each rank: the same bits."""
    common: dict[str, Any] = {"ranks": 2, "steps": STEPS, "folder": str(tmp_path), "bf16": bf16}
    reference = pair.run(cases.training, **common)
    for prefetch, late in ((0, True), ("1GiB", False)):
        result = pair.run(cases.training, update=update, prefetch_bytes=prefetch, late=late, **common)
        assert mean(result) == mean(reference), f"prefetch_bytes {prefetch}, late {late}"
        assert_bits(result[0], reference[0])


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("states", ["nvme", "cpu"])
def test_a_share_of_the_updates_in_the_next_forward(pair: Group, states: str, late: bool, tmp_path: Path) -> None:
    common: dict[str, Any] = {"ranks": 2, "steps": STEPS, "folder": str(tmp_path), "param": states, "optim": states}
    reference = pair.run(cases.training, **common)
    result = pair.run(cases.training, forward_updates=0.5, late=late, **common)
    assert mean(result) == mean(reference)
    assert_bits(result[0], reference[0])
    assert_bits(result[1], reference[1])


def test_ranks_start_with_the_values_of_the_first(pair: Group, tmp_path: Path) -> None:
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "folder": str(tmp_path)}
    reference = pair.run(cases.training, **common)
    result = pair.run(cases.training, seed=0, **common)
    assert_bits(result[0], reference[0])
    assert_bits(result[1], reference[0])


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
def test_a_group_of_one(single: Group, bf16: bool, clip: float, late: bool, tmp_path: Path) -> None:
    """Collectives over one rank take their whole path and change nothing."""
    common: dict[str, Any] = {"folder": str(tmp_path), "bf16": bf16, "clip": clip}
    outcome = single.run(cases.training, ranks=1, steps=STEPS, late=late, **common)[0]
    expected = cases.one_rank(STEPS, 1, accumulated=False, **common)
    assert outcome["losses"] == expected["losses"]
    assert_bits(outcome, expected)
