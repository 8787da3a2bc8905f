"""Experts on two ranks whose tokens choose others: training in tiles is that of whole tensors, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from multirank import expert_cases as cases
from support.ranks import Group
from zoo.families import FAMILIES

STAGES: list[dict[str, Any]] = [{"stage": 3}, {"stage": 2, "param": "none"}]


def assert_same(whole: list[Any], tiled: list[Any]) -> None:
    """Assert losses and states of each rank, and that the ranks chose differently in a call."""
    chosen = list(zip(whole[0][1], whole[1][1], strict=True))
    assert any(set(one) - set(other) and set(other) - set(one) for one, other in chosen)
    for (losses, _, states), (expected, _, others) in zip(tiled, whole, strict=True):
        assert losses == expected
        assert states.keys() == others.keys()
        assert all(torch.equal(states[name], value) for name, value in others.items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_tiles_train_as_whole_tensors(pair: Group, options: dict[str, Any], frozen: bool, tmp_path: Path) -> None:
    """Bit for bit, saved and resumed; ranks read all tiles, and each gives gradients of zeros to experts it lacks."""
    whole, tiled = (
        pair.run(
            cases.trained, folder=str(tmp_path), max_bytes=limit, target=tmp_path / str(limit), frozen=frozen, **options
        )
        for limit in (0, cases.LIMIT)
    )
    assert_same(whole, tiled)


@pytest.mark.campaign(few=2)
@pytest.mark.parametrize(
    ("family", "options", "frozen"),
    [(family, options, not number % 3) for number, family in enumerate(FAMILIES) for options in STAGES],
    ids=str,
)
def test_families_train_in_tiles_as_whole(
    pair: Group, family: str, options: dict[str, Any], frozen: bool, tmp_path: Path
) -> None:
    """The same for each family, on a third of them with frozen experts."""
    whole, tiled = (
        pair.run(
            cases.family_trained,
            folder=str(tmp_path),
            family=family,
            share=share,
            target=tmp_path / str(share),
            frozen=frozen,
            **options,
        )
        for share in (0, 0.25)
    )
    assert_same(whole, tiled)


@pytest.mark.parametrize("param", ["nvme", "cpu"])
def test_ranks_generate_their_own_text(pair: Group, param: str, tmp_path: Path) -> None:
    for text, expected in pair.run(cases.generated, folder=str(tmp_path), param=param):
        assert text == expected
