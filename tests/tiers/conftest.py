"""Fixtures for the tests of tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def no_leaks(tmp_path: Path) -> Iterator[None]:
    """Assert that no descriptor stays open, and no file stays in the folder or its subfolders."""
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert list(tmp_path.rglob("infinity-*")) == []
