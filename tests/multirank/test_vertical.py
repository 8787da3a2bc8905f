"""`engine.train_batch` on two ranks: the bits of a loop, parameters gathered once a step, and refusals on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multirank import vertical_cases as cases
from support.ranks import Group


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"] and one["norm"] == other["norm"]
        assert one["values"].keys() == other["values"].keys()
        assert all(torch.equal(value, other["values"][name]) for name, value in one["values"].items())


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "update": "next_forward"},
        {"param": "none", "optim": "none", "tied": True, "clip": 0.1},
        {"fp16": {"initial_scale_power": 17, "hysteresis": 1}, "tied": True, "debug": False},
        {"communication": "bf16", "accumulated_in": "bf16", "clip": 0.1, "debug": False},
    ],
    ids=str,
)
def test_two_ranks_have_the_bits_of_the_ordinary_order(pair: Group, options: dict[str, Any]) -> None:
    found = pair.run(cases.trained, batched=True, **options)
    expected = pair.run(cases.trained, batched=False, **options)
    assert_equal(found, expected)
    # In 16 bits the buffers hold twice as many units, so that the ordinary order gathers fewer of them again.
    assert (
        found[0]["gathered"][-1]
        < (0.75 if "bf16" in options or "fp16" in options else 0.45) * expected[0]["gathered"][-1]
    )


REASONS = {
    "order": r"called blocks[4] when blocks[3] was due",
    "random": "the forward draws random numbers",
    "skip": "a gradient reaches a block by another way",
    "hook": "has hooks",
}


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=str)
@pytest.mark.parametrize("way", REASONS)
@pytest.mark.parametrize("step", [0, 2])
def test_a_refusal_on_one_rank_is_an_error_on_all(
    pair: Group, way: str, ranks: list[int], step: int, update: str
) -> None:
    """The ranks that refuse raise the reason. The others, which wait in a collective, raise RanksError with it."""
    found = pair.run(cases.refused, way=way, ranks=ranks, step=step, timeout=45, debug=False, update=update)
    for rank, errors in enumerate(found):
        assert errors["steps"] == str(step)
        assert REASONS[way] in errors["first"]
        assert errors["first"].startswith("RanksError: rank 1 failed: ") != (rank in ranks)
        assert REASONS[way] in errors["second"] and errors["second"].startswith(("RanksError", "UsageError"))


def test_a_difference_on_one_rank_is_an_error_on_all(pair: Group) -> None:
    """`infinity.debug`, before the update."""
    for errors in pair.run(cases.refused, way="shared", ranks=[1], step=0, timeout=45):
        assert "differs from that of a loop over the micro-batches on rank " in errors["first"]
        assert errors["first"].startswith("ModelError") and errors["second"].startswith("RanksError")
        assert errors["steps"] == "0"
