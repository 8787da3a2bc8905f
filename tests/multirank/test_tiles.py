"""Tiled layers on several ranks: the same checkpoints and training as on one, whatever the tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from multirank import tiled_cases as cases
from support.ranks import Group


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("options", [{"bf16": True}, {"stage": 1, "param": "none"}], ids=str)
def test_checkpoints_go_from_tiles_to_tiles(
    pair: Group, single: Group, options: dict[str, Any], tmp_path: Path
) -> None:
    """From two ranks to one and back; states are equal bit for bit."""
    source, outcomes, saved = None, [], []
    for group, max_bytes in ((pair, 9000), (pair, 0), (single, 6000), (pair, 6000)):
        target = tmp_path / f"saved-{len(saved)}"
        ran = group.run(
            cases.resumed, folder=str(tmp_path), source=source, max_bytes=max_bytes, target=target, **options
        )
        outcomes.append(ran)
        saved.append(tensors_of(target))
        source = target
    for ranks in outcomes:
        for _, states, _ in ranks:
            assert all(torch.equal(value, outcomes[0][0][1][name]) for name, value in states.items())
    for found in saved[1:]:
        assert found.keys() == saved[0].keys()
        assert all(torch.equal(value, saved[0][name]) for name, value in found.items())
    for rank in range(2):
        for other in (outcomes[1], outcomes[3]):
            assert other[rank][0] == pytest.approx(outcomes[0][rank][0], rel=2e-2 if options.get("bf16") else 1e-5)
