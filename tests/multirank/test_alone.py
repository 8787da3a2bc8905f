"""A call that fails on one rank raises on all, even if nothing is exchanged after the failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirank import alone_cases as cases
from support.ranks import Group


@pytest.mark.every_case
@pytest.mark.parametrize("case", cases.CASES)
def test_a_rank_that_fails_alone(pair: Group, case: str, tmp_path: Path) -> None:
    first, last = pair.run(cases.failing_alone, folder=str(tmp_path), case=case)
    assert last == f"ValueError: {cases.TEXT}"
    assert first.startswith("RanksError: rank 1 ") and cases.TEXT in first
