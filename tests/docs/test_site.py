"""The documentation site shows every page. `make docs` builds it from mkdocs.yml and checks its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
HIDDEN = {"bench/results/refactoring.md"}
PAGES = {
    path.relative_to(ROOT).as_posix() for folder in ("docs", "bench/results") for path in (ROOT / folder).glob("*.md")
} - HIDDEN


@pytest.mark.parametrize("page", sorted(PAGES | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}))
def test_a_page_is_in_the_navigation(page: str) -> None:
    assert re.search(rf": {re.escape(page)}$", SITE, re.MULTILINE), f"add {page} to nav in mkdocs.yml"


def test_the_navigation_names_pages_that_exist() -> None:
    for page in re.findall(r"- .+: (\S+\.md)$", SITE, re.MULTILINE):
        assert (ROOT / page).is_file(), page
