"""Experts on two ranks whose tokens choose others: training in tiles is that of whole tensors, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from multirank import expert_cases as cases
from support.ranks import Group


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 2, "param": "none"}], ids=str)
def test_tiles_train_as_whole_tensors(pair: Group, options: dict[str, Any], frozen: bool, tmp_path: Path) -> None:
    """Bit for bit, saved and resumed; ranks read all tiles, and each gives gradients of zeros to experts it lacks."""
    whole, tiled = (
        pair.run(
            cases.trained, folder=str(tmp_path), max_bytes=limit, target=tmp_path / str(limit), frozen=frozen, **options
        )
        for limit in (0, cases.LIMIT)
    )
    chosen = list(zip(whole[0][1], whole[1][1], strict=True))
    assert any(set(one) - set(other) and set(other) - set(one) for one, other in chosen)
    for (losses, _, states), (expected, _, others) in zip(tiled, whole, strict=True):
        assert losses == expected
        assert all(torch.equal(states[name], value) for name, value in others.items())


@pytest.mark.parametrize("param", ["nvme", "cpu"])
def test_ranks_generate_their_own_text(pair: Group, param: str, tmp_path: Path) -> None:
    for text, expected in pair.run(cases.generated, folder=str(tmp_path), param=param):
        assert text == expected
