"""Sums, averages and norms of gradients on two ranks, against a loop over whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multirank import gradient_cases as cases
from support.ranks import Group

UNMANAGED = {"managed_gradient_accumulation": False}
SUM = {"gradient_allreduce_op": "sum"}
SLOW = pytest.mark.slow
CASES = [
    (0, "no_sync", {}, 1.0),
    (1, "boundary", {"infinity": {"accumulation_buffers": True, "unit_size": 20_000}}, 1.0),
    pytest.param(3, "no_sync", {"update": "next_forward"}, 1.0, marks=SLOW),
    pytest.param(2, "boundary", {}, 1.0, marks=SLOW),
    pytest.param(0, "plain", {"gradient_accumulation_steps": 2}, 0.5, marks=SLOW),
    (3, "plain", {"gradient_accumulation_steps": 2}, 0.5),
    pytest.param(1, "unmanaged", {**UNMANAGED, "gradient_accumulation_steps": 2}, 0.5, marks=SLOW),
    (3, "unmanaged", {**UNMANAGED, "update": "next_forward"}, 1.0),
    (1, "boundary", {**SUM, "gradient_accumulation_steps": 2}, 1.0),
    (2, "boundary", {**SUM, "update": "after_backward"}, 2.0),
    (3, "no_sync", SUM, 2.0),
]
"""Stage, way, config, and the factor of a loss over the batches of both ranks. "auto" updates stage 3 in backward."""


@pytest.mark.every_case
@pytest.mark.parametrize(("stage", "way", "top", "factor"), CASES)
def test_two_ranks_are_one_loop(pair: Group, stage: int, way: str, top: dict[str, Any], factor: float) -> None:
    """Norms, gradients and parameters equal those of the loop, and both ranks have the same."""
    expected = cases.plainly(factor)
    ranks = pair.run(cases.trained, stage=stage, way=way, **top)
    assert ranks[0]["norms"] == ranks[1]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for found in ranks:
        for name, value in expected["values"].items():
            torch.testing.assert_close(found["values"][name], value, rtol=1e-4, atol=1e-5)
        if "update" in top:
            torch.testing.assert_close(found["gradient"], expected["gradient"], rtol=1e-4, atol=1e-5)


def test_the_norm_has_the_same_bits_in_every_schedule(pair: Group) -> None:
    """Stage 3 without clipping: units updated in backward count as if they had waited."""
    options: dict[str, Any] = {"stage": 3, "way": "boundary", "gradient_accumulation_steps": 2}
    outcomes = [pair.run(cases.trained, update=update, **options)[0]["norms"] for update in ("auto", "next_forward")]
    assert outcomes[0] == outcomes[1] and None not in outcomes[0]
