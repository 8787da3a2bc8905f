"""The documentation site shows every page. `make docs` builds it from mkdocs.yml and checks its links."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
HIDDEN = {"bench/results/refactoring.md"}
PAGES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "docs/notes", "bench/results")
    for path in (ROOT / folder).glob("*.md")
} - HIDDEN
TABS: dict[str, list[Any]] = {title: pages for tab in yaml.safe_load(SITE)["nav"] for title, pages in tab.items()}
"""Tabs of the site → their navigation: entries of one key, whose values are a page or more entries."""
_COMMAND = re.compile(r"\s*(?:\$ )?(?:infinity|python|torchrun|pip|make|deepspeed|accelerate|srun|sbatch) ")


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_files", ROOT / "docs" / "site_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def shown(entries: list[Any], level: int = 1) -> int:
    """Lines of a tab's navigation before a reader unfolds anything: the theme folds groups within groups."""
    below = [value for entry in entries for value in entry.values() if isinstance(value, list) and level < 2]
    return len(entries) + sum(shown(value, level + 1) for value in below)


@pytest.mark.parametrize("tab", TABS)
def test_the_navigation_of_a_tab_fits_a_screen(tab: str) -> None:
    assert shown(TABS[tab]) <= 25, "group pages in mkdocs.yml"


def test_a_newcomer_starts_at_the_first_tab_and_the_gpu_leads_the_measurements() -> None:
    assert [next(iter(entry.values())) for entry in TABS["Guide"][:2]] == ["README.md", "docs/getting_started.md"]
    assert next(iter(TABS["Measurements"][1].values())) == "bench/results/gpu.md"


def test_names_in_tables_stay_whole_and_long_code_is_not_cut_off() -> None:
    """The theme breaks code at any letter. Names of the first column stay on a line; a phone breaks at `<wbr>` only."""
    styles = re.sub(r"/\*.*?\*/", "", (ROOT / "docs" / "site.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert yaml.safe_load(SITE)["extra_css"] == ["docs/site.css"] and "docs/site.css" in hooks().SHOWN
    rules = dict(re.findall(r"^(\S[^{}]*?) \{\n(.*?)^\}", styles, re.MULTILINE | re.DOTALL))
    code = ".md-typeset table:not([class])"
    assert "word-break: normal" in rules[f"{code} code"] and "overflow-wrap: normal" in rules[f"{code} code"]
    assert "white-space: nowrap" in rules[f"{code} td:first-child code"]
    assert "display: none" in rules[f"{code} code wbr"]
    assert re.search(r"min-width: 60em\) \{\s*\.md-typeset pre > code \{\s*white-space: pre-wrap;", styles)


def commands(page: str) -> Iterator[str]:
    """Lines of commands in fenced blocks, and the lines that continue them."""
    fenced = continued = False
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            fenced, continued = not fenced, False
        elif fenced and (continued or _COMMAND.match(line)):
            yield line
            continued = line.endswith("\\")


def test_commands_fit_a_line_of_the_site() -> None:
    """The theme breaks a longer one behind a hyphen, such as that of an option. A comment may wrap."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [(page.relative_to(ROOT), line) for page in pages for line in commands(page.read_text())]
    assert len(found) > 60
    assert not [each for each in found if len(each[1].partition("  #")[0]) > 104]


def test_names_in_cells_may_break_after_separators() -> None:
    page = "<td><code>offload_param.nvme_path</code>, <code>a/b</code></td> <p><code>x_y</code></p> <td>x_y</td>"
    expected = page.replace("offload_param.nvme_path", "offload_<wbr>param.<wbr>nvme_<wbr>path").replace(
        "a/b", "a/<wbr>b"
    )
    assert hooks().on_page_content(page) == expected
    assert hooks().on_page_content("<td><code>--host-memory</code> <code>__call__</code></td>").count("<wbr>") == 2


def test_nested_lists_are_indented_as_python_markdown_requires() -> None:
    page = "- a\n  - b\n\n```\n  - code\n```"
    assert hooks().on_page_markdown(page) == page.replace("  - b", "    - b")


@pytest.mark.parametrize(
    ("html", "lost"),
    [
        ("<p>Three:\n3. Train, <code>x</code></p>", ["3. Train, "]),
        ("<li>\n<p>An error:\n    - a rate;\n- other</p></li>", ["- a rate;", "- other"]),
        ("<ul>\n<li>t\n    - u</li>\n<li>v\n<ul>\n<li>w</li>\n</ul>\n</li>\n</ul>", ["- u"]),
        ("<pre><code>\n- x</code></pre><p>a - b</p>\n<ul><li>c</li></ul>\n- d", []),
    ],
)
def test_a_list_that_became_text_is_found(html: str, lost: list[str]) -> None:
    """`make docs` fails on one."""
    assert hooks().lost_items(html) == lost


def test_blocks_of_list_items_are_indented_by_four_spaces() -> None:
    """With fewer, Python-Markdown ends the list, and the items after it become one paragraph."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    short = []
    for page in pages:
        before, in_item = "", False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line and not line.startswith(" "):
                in_item = bool(re.match(r"([-*]|\d+\.) ", line))
            elif in_item and not before.strip() and re.match(r" {1,3}\S", line):
                short.append(f"{page.relative_to(ROOT)}:{number}")
            before = line
    assert not short
