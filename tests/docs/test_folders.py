"""README.md of each folder of tests/ names its promises, files that exist, and the command that runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = sorted(path for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith(("_", ".")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_lists_its_promises(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {folder.name}\n") and "\nRun: `" in text
    table = "\n".join(line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| "))
    assert [name for name in re.findall(r"`([^`]+)`", table) if not (folder / name).exists()] == []
