"""Tiers that cannot be opened leave nothing open."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from infinity.tiers import open_tiers
from support.configs import engine_config
from support.descriptors import open_files
from support.loops import open_engine
from support.models import Stack, seeded


def test_a_tier_that_fails_closes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError("no staging buffers")

    gc.collect()
    before = open_files()
    monkeypatch.setattr(open_tiers, "NvmeTier", fail)
    with pytest.raises(MemoryError, match="no staging buffers"):
        open_engine(seeded(Stack), engine_config(folder=tmp_path))
    gc.collect()
    assert open_files() == before
