from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.cli.drive import tune as tuning
from infinity.cli.drive.search import Space
from support.descriptors import open_files


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in which no file may be left and none may stay open."""
    made = tmp_path / "drive"
    made.mkdir()
    yield made
    assert os.listdir(made) == []
    assert [target for target in open_files() if target.startswith(str(made))] == []


@pytest.fixture
def small_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep few settings, since the results do not matter here."""
    few = Space(blocks=(1 << 18, 1 << 20), depths=(4, 8), threads=(1,), engines=("libaio",))
    monkeypatch.setattr(tuning, "space", lambda engine, cores, folders: few)
