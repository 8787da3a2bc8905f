"""The documentation site shows every page. `make docs` builds it from mkdocs.yml and checks its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
HIDDEN = {"bench/results/refactoring.md"}
PAGES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "docs/notes", "bench/results")
    for path in (ROOT / folder).glob("*.md")
} - HIDDEN


@pytest.mark.parametrize("page", sorted(PAGES | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}))
def test_a_page_is_in_the_navigation(page: str) -> None:
    assert re.search(rf": {re.escape(page)}$", SITE, re.MULTILINE), f"add {page} to nav in mkdocs.yml"


def test_the_navigation_names_pages_that_exist() -> None:
    for page in re.findall(r"- .+: (\S+\.md)$", SITE, re.MULTILINE):
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("page", sorted(PAGES | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}))
def test_links_lead_to_files_of_the_site(page: str) -> None:
    """mkdocs refuses other links, in `make docs`."""
    shown = re.findall(r'^    "(\S+)",$', (ROOT / "docs" / "site_files.py").read_text(), re.MULTILINE)
    files = {path for pattern in shown for path in ROOT.glob(pattern)}
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert [link for link in targets - {""} if (ROOT / page).parent.joinpath(link).resolve() not in files] == []
