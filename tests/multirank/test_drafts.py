"""Drafts on several ranks have the bits of updates that wait for the norm, although ranks may draft different units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multirank import draft_cases
from support.ranks import Group

PLACES: dict[str, dict[str, Any]] = {
    "nvme": {"late": False},
    "late device, host": {"late": True, "param": "cpu", "optim": "cpu"},
    "late device, nvme": {"late": True},
    "replicated parameters": {"late": False, "stage": 1, "param": "none"},
}


def trained(pair: Group, folder: Path, place: str, **options: Any) -> list[list[tuple[int, int]]]:
    """Train on two ranks with drafts and without, and compare. Returns the drafts made and kept, by rank and step."""
    given = {"folder": str(folder), **PLACES[place], **options}
    expected = pair.run(draft_cases.training, speculate=False, **given)
    found = pair.run(draft_cases.training, **given)
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert one["values"].keys() == other["values"].keys()
        assert all(torch.equal(one["values"][name], value) for name, value in other["values"].items())
        assert not any(made for made, _ in other["drafts"])
    return [one["drafts"] for one in found]


@pytest.mark.parametrize("scaled", [(), (2, 5)], ids=["none", "some"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_drafts_have_the_same_bits(
    pair: Group, place: str, accumulation: int, scaled: tuple[int, ...], tmp_path: Path
) -> None:
    drafts = trained(pair, tmp_path, place, accumulation=accumulation, scaled=scaled)
    if place == "replicated parameters":  # parameters have no second slot in memory
        return
    for steps in drafts:
        assert steps[-1][0] and steps[-1][0] == steps[-1][1]
        assert all(kept == 0 for step, (_, kept) in enumerate(steps) if step in scaled)


@pytest.mark.parametrize("between", ["", "read", "edit"])
@pytest.mark.parametrize("holds", ["nothing", "graphs", "views"])
@pytest.mark.parametrize("place", ["nvme", "late device, host"])
def test_ranks_may_draft_different_units(pair: Group, place: str, holds: str, between: str, tmp_path: Path) -> None:
    """A rank that refers to a unit makes no draft of it. Both fetch it again if its parameters are read."""
    first, second = trained(pair, tmp_path, place, holds=holds, between=between, scaled=(3,))
    assert sum(made for made, _ in second)
    if holds != "nothing":
        assert sum(made for made, _ in first) < sum(made for made, _ in second)
