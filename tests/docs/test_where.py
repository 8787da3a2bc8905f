"""docs/where.md names files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")
PATHS = re.findall(r"`((?:infinity|csrc|tests|bench|docs|requirements)/[\w./-]*|[\w.-]+\.(?:md|toml|yml))`", PAGE)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| change")]


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


NAMES = re.findall(r"`([\w.]+)`(?: and `([\w.]+)`)?,? in `((?:infinity|tests|bench)/[\w./-]*)`", PAGE)


@pytest.mark.parametrize(("first", "second", "path"), NAMES)
def test_a_name_occurs_in_its_file(first: str, second: str, path: str) -> None:
    place = ROOT / path
    text = "".join(each.read_text(encoding="utf-8") for each in (place.rglob("*.py") if place.is_dir() else [place]))
    for name in filter(None, (first, second)):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_change_has_a_start_and_a_proof(row: str) -> None:
    _, _, start, _, proof, _ = row.split("|")
    assert "`" in start and re.search(r"`(tests/|make )", proof)


def test_the_page_has_twenty_changes() -> None:
    assert len(ROWS) >= 20
