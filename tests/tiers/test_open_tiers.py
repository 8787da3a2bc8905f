"""Tiers that cannot be opened leave nothing open, and reads that cannot start hang nobody."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from infinity.tiers import open_tiers
from infinity.tiers.nvme import NvmeTier
from support.configs import engine_config
from support.descriptors import open_files
from support.loops import open_engine
from support.models import Linears, Stack, seeded, vector_batches


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


@pytest.mark.timeout(60)
def test_a_window_whose_read_cannot_start_raises_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(seeded(Linears), engine_config(folder=tmp_path, update="after_backward"))
    engine.backward(engine(*vector_batches(1)[0]))

    def fail(*arguments: Any) -> None:
        raise MemoryError("no request")

    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "_read", fail)
        with pytest.raises(MemoryError, match="no request"):
            engine.step()
    with pytest.raises(MemoryError, match="no request"):  # the update is still owed; everything is released
        engine.close()
