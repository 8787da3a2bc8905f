"""Hooks of the documentation site: its tree is the repository's, so that relative links hold on both.

mkdocs reads one folder. These hooks add the pages outside of it, README.md as the home page, and move `docs/` below the
root. mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests import the other hooks where mkdocs is not installed
    from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "tests/hostile/*.py",
    "LICENSE",
    "docs/*.md",
    "docs/notes/*.md",
    "docs/*.svg",
    "docs/site.css",
    "bench/results/*.md",
    "bench/results/*.png",
    "bench/configs/*.json",
    "examples/**/*.py",
    "examples/**/*.sbatch",
)
OMITTED = {"bench/results/refactoring.md"}
"""Pages about the history of the source, which are of use in a checkout only."""

_FENCE = re.compile(r"^\s*(```|~~~)")
_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+")
_VERBATIM = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
_PARAGRAPH = re.compile(r"<(?:p|li)>(.*?)(?=</?(?:p|li|ul|ol|div)>)", re.DOTALL)
_ITEM = re.compile(r"\n\s*((?:[-*+]|\d+\.) .*)")
_NESTED = re.compile(r"^( {2,})(?=[-*] )")


def on_files(files: Files, config: Any) -> Files:
    """Return the files of the site: those of `SHOWN`, and those of the theme and plugins."""
    from mkdocs.structure.files import File, Files

    paths = sorted(set(chain.from_iterable(map(ROOT.glob, SHOWN))))
    own = [path for path in paths if path.relative_to(ROOT).as_posix() not in OMITTED]
    added = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in own]
    return Files([*added, *(file for file in files if not _is_of(file, config.docs_dir))])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return `markdown` with nested lists indented by 4 columns, as Python-Markdown requires; the pages use 2."""
    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= _FENCE.match(line) is not None
        lines.append(line if fenced else _NESTED.sub(r"\1\1", line))
    return "\n".join(lines)


def on_page_content(html: str, *, page: Any = None, **_: Any) -> str:
    """Return `html` with code in tables breakable after `_`, `.` and `/` within a name, as site.css needs on phones.

    Raises PluginError for a list that became text.
    """
    if lost := lost_items(html):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page}: a list needs an empty line before it: {'; '.join(lost)}")

    def breakable(cell: re.Match[str]) -> str:
        return _CODE.sub(lambda code: re.sub(r"(?<=\w)([_./])(?=\w)", r"\1<wbr>", code[0]), cell[0])

    return _CELL.sub(breakable, html)


def lost_items(html: str) -> list[str]:
    """Return the lines of paragraphs that were written as items of a list. Python-Markdown needs an empty line before
    an item that follows an indented paragraph.
    """
    prose = _VERBATIM.sub("", html)
    return [item for text in _PARAGRAPH.findall(prose) for item in _ITEM.findall(text)]


def _is_of(file: File, folder: str) -> bool:
    return file.src_dir is not None and Path(file.src_dir) == Path(folder)
