"""Finds the mutants of a source file. Each differs from it in one place; formatting and comments stay."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutants.rules import Edit, edits, positions_of_after


@dataclass(frozen=True)
class Mutant:
    """A source file without one of its guards."""

    file: str
    """Relative to the package, "units/store.py"."""
    name: str
    """File, function, kind and number within that function: "units/store.py:UnitStore.release:wait#2". Changes of
    other lines do not change it.
    """
    line: int
    original: str
    source: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.original.splitlines(), self.source.splitlines(), self.file, self.name, lineterm="", n=2
        )
        return "\n".join(lines)

    def change(self) -> str:
        """The lines that differ, for a table."""
        return " ".join(line[1:].strip() for line in self.diff().splitlines()[2:] if line.startswith("+"))


def find(package: Path, files: Iterable[str]) -> list[Mutant]:
    """The mutants of these files of a package, in the order of the source."""
    sources = {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}
    after = positions_of_after(ast.parse(source) for source in sources.values())
    return [mutant for file in files for mutant in mutants_of(file, sources[file], after)]


def mutants_of(file: str, source: str, after: Mapping[str, int]) -> Iterator[Mutant]:
    """The mutants of one source. after: method → the position of its argument `after`."""
    seen = {source}
    counts: Counter[tuple[str, str]] = Counter()
    text = source.encode()
    starts = _line_starts(text)
    for edit in sorted(edits(ast.parse(source), after), key=lambda edit: (edit.start, edit.kind, edit.end)):
        begin, end = (starts[line - 1] + column for line, column in (edit.start, edit.end))
        changed = (text[:begin] + _filled(edit, source, text[begin:end]) + text[end:]).decode()
        if changed in seen:
            continue
        seen.add(changed)
        counts[edit.function, edit.kind] += 1
        name = f"{file}:{edit.function}:{edit.kind}#{counts[edit.function, edit.kind]}"
        yield Mutant(file, name, edit.start[0], source, changed)


def _filled(edit: Edit, source: str, replaced: bytes) -> bytes:
    """Return the replacement with the kept node's text in place of "{}"."""
    if edit.kept is None:
        return edit.replacement.encode()
    kept = ast.get_source_segment(source, edit.kept)
    assert kept is not None and kept.encode() in replaced
    return edit.replacement.format(kept).encode()


def _line_starts(text: bytes) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts
