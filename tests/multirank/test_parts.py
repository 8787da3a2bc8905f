"""Parts of checkpoints, weights in one file and `offload_states` on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank import part_cases as cases
from support.ranks import Group


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_a_checkpoint(pair: Group, stage: int, tmp_path: Path) -> None:
    for found in pair.run(cases.parts_of_a_checkpoint, folder=str(tmp_path), stage=stage):
        assert found == dict.fromkeys(found, True)
