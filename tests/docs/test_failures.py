"""docs/failures.md: each row names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/failures.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| event ")
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row).split(" | ")[0].removeprefix("| "))
def test_a_row_names_tests_that_exist(row: str) -> None:
    event, behaviour, named = row.strip("| ").split(" | ")
    assert event and behaviour
    tests = TEST.findall(named)
    assert tests, "the row names no test"
    for file, name in tests:
        assert name in names_in(file), f"{file} has no {name}"
