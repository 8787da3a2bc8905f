"""The design page stays short, and its notes are found: by citations in the code, and by links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
NOTES = sorted((ROOT / "docs" / "notes").glob("*.md"))
PAGES = [DESIGN, ROOT / "docs" / "where.md", *NOTES]
HEADINGS = [
    heading.casefold()
    for page in NOTES
    for heading in re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
CODE = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")


def citations(text: str) -> list[str]:
    """Return the names in `[Note: …]`. A citation may continue on the next line of a comment."""
    return [re.sub(r"\s*\n\s*(#|//|\*)?\s*", " ", name) for name in re.findall(r"\[Note: ([^\]…]+)\]", text)]


def prose(page: Path) -> list[str]:
    """Return the lines of a page outside of code, without spans of code and targets of links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"\]\([^)\s]*\)", "]", text)).splitlines()


def test_the_design_page_is_read_in_a_quarter_of_an_hour() -> None:
    assert len(DESIGN.read_text(encoding="utf-8").split()) <= 4000


def test_a_note_has_one_heading() -> None:
    assert sorted(HEADINGS) == sorted(set(HEADINGS))


def test_the_design_page_links_every_page_of_notes() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    assert [page.name for page in NOTES if f"](notes/{page.name})" not in text] == []


@pytest.mark.parametrize("folder", ["infinity", "csrc", "bench", "tests", "examples", "docs", "lint"])
def test_every_citation_leads_to_a_heading(folder: str) -> None:
    unknown = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (*CODE, ".md") and path.is_file() and path != Path(__file__)
        for name in citations(path.read_text(encoding="utf-8"))
        if name.casefold() not in HEADINGS
    ]
    assert unknown == []


def test_citations_are_found_across_lines() -> None:
    assert citations("a [Note: one] b\n# c [Note: two\n# lines] d\n// e [Note: three\n// lines]") == [
        "one",
        "two lines",
        "three lines",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_line_has_one_sentence_and_fits(page: Path) -> None:
    lines = [line for line in prose(page) if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []
    assert [line for line in lines if re.search(r"[a-z`)\]][.?!] [A-Z]", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_hold_facts_and_no_targets(page: Path) -> None:
    private = re.compile(r"\b(aimed|allowed|asked for|at least|at most|targets?)\b", re.IGNORECASE)
    assert [line for line in prose(page) if private.search(line)] == []
