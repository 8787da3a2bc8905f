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


def on_page_content(html: str, **_: Any) -> str:
    """Return `html` with code in tables breakable after `_`, `.` and `/` within a name, as site.css needs on phones."""

    def breakable(cell: re.Match[str]) -> str:
        return _CODE.sub(lambda code: re.sub(r"(?<=\w)([_./])(?=\w)", r"\1<wbr>", code[0]), cell[0])

    return _CELL.sub(breakable, html)


def _is_of(file: File, folder: str) -> bool:
    return file.src_dir is not None and Path(file.src_dir) == Path(folder)
