"""The order in which a budget gives room to states is close to the best one that bench/simulate_order.py finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from report.simulate_order import excess
from simulate_order import SHAPE, Case, run

WITHIN = 0.03
"""Share by which a step may be longer than with the best order."""
TINY = replace(SHAPE, num_layers=4)


@pytest.mark.parametrize(
    "case",
    [
        Case("v100", "fp32", "", 1, 0.6, 0.4),
        pytest.param(Case("v100", "8bit", "clipping", 2, 0.2, 0.4), marks=pytest.mark.campaign),
    ],
    ids=lambda case: case.name,
)
def test_a_step_with_the_engines_order_is_close_to_the_best(case: Case) -> None:
    found = run(case, TINY)
    assert excess(found, max(found["orders"].values())) > 3 * WITHIN, "orders differ"
    assert excess(found, found["engine"]) <= WITHIN
