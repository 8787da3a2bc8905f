"""Python code of docs/*.md runs, and its JSON is a configuration.

The blocks of a page run in order in one namespace, in an empty folder. `setups/<page>.py` first defines what a page
takes for granted, such as `model`. Its function `before(block)`, if any, is called before each block, with its number.

A line `<!-- not run: reason -->` above a block excludes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.engine.base import open_engines

DOCS = Path(__file__).parents[2] / "docs"
SETUPS = Path(__file__).parent / "setups"
FENCED = re.compile(r"^(<!-- not run: (?P<reason>.+) -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    code: str
    line: int
    """Number of its first line in the page, from 1."""
    reason: str | None
    """The reason why it is not run."""


def blocks(page: Path, kind: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = (
        Block(match["kind"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["reason"])
        for match in FENCED.finditer(text)
    )
    return [block for block in found if block.kind == kind]


def pages(kind: str) -> list[str]:
    return sorted(page.stem for page in DOCS.glob("*.md") if any(not b.reason for b in blocks(page, kind)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; engines that a page leaves open are closed."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for engine in list(open_engines):
        engine.close()


@pytest.mark.parametrize("page", pages("python"))
def test_python_of_a_page_runs(page: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    setup = SETUPS / f"{page}.py"
    if setup.exists():
        if "transformers" in setup.read_text(encoding="utf-8"):
            pytest.importorskip("transformers")
        exec(compile(setup.read_text(encoding="utf-8"), str(setup), "exec"), names)
    for number, block in enumerate(blocks(DOCS / f"{page}.md", "python")):
        if not block.reason:
            if "before" in names:
                names["before"](number)
            code = "\n" * (block.line - 1) + block.code  # so that a traceback shows the page's line
            exec(compile(code, str(DOCS / f"{page}.md"), "exec"), names)


@pytest.mark.parametrize("page", pages("json"))
def test_json_of_a_page_is_a_configuration(page: str) -> None:
    for block in blocks(DOCS / f"{page}.md", "json"):
        infinity.Config.load(json.loads(block.code))


def test_every_setup_belongs_to_a_page() -> None:
    assert {setup.stem for setup in SETUPS.glob("*.py")} <= set(pages("python"))
