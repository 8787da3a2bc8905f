"""Four ranks train as one does on the same global batches, in every stage; their checkpoints go to other numbers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import cases
from multirank.test_ranks import STEPS, apart, assert_bits, mean
from support.ranks import Group

pytestmark = pytest.mark.slow


PLACES = [(3, "nvme", "nvme"), (3, "none", "cpu"), (2, "none", "nvme"), (1, "none", "cpu"), (0, "none", "none")]


@pytest.mark.parametrize(("place", "accumulation", "clip"), list(product(PLACES, [1, 4], [0.0, 0.3])), ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_as_one_rank(
    four: Group, place: tuple[int, str, str], accumulation: int, clip: float, bf16: bool, tmp_path: Path
) -> None:
    """fp32: losses within 1e-6, parameters within 1e-5. bf16: gradients of fewer samples are rounded by themselves."""
    stage, param, optim = place
    common: dict[str, Any] = {"folder": str(tmp_path), "bf16": bf16, "clip": clip, "eps": 1e-4}
    options: dict[str, Any] = {"ranks": 4, "steps": STEPS, "accumulation": accumulation}
    outcomes = four.run(cases.training, **options, stage=stage, param=param, optim=optim, **common)
    expected = cases.one_rank(STEPS, 4, accumulated=True, accumulation=accumulation, **common)
    for other in outcomes[1:]:
        assert_bits(outcomes[0], other)
    assert mean(outcomes) == pytest.approx(expected["losses"], rel=2**-8 if bf16 else 1e-6)
    assert apart(outcomes[0], expected) <= (2**-8 if bf16 else 1e-5)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_checkpoints_of_four_go_to_two_and_one_and_back(
    four: Group, pair: Group, single: Group, moments: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "directory": str(tmp_path / "saved"), "moments": moments}
    saved = four.run(cases.save, steps=3, **options)
    for group, more in ((pair, {"stage": 2, "param": "none"}), (single, {}), (four, {"stage": 0, "param": "none"})):
        for loaded in group.run(cases.load, **options, **more):
            assert all(torch.equal(loaded[name], value) for name, value in saved[0].items())
