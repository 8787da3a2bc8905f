"""Counts signs of a tangled shape, and compares them with limits.

    python lint/house.py [ROOT]

Objects that others complete from outside, and callables that constructors take, hide who decides. Files of a few lines
and endless pages hide where. Prints a line for each count, and exits with 1 if one is beyond its limit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

HEART = ("engine", "model", "units", "grads", "update")
"""Packages whose objects exchange decisions."""
COMMENTED = ("model", "units", "grads", "update", "tiers", "comm")
"""Packages whose lines need reasons."""
SHORT = 60
"""Lines of a file below which it is short."""

ASSIGNED = "attributes of other objects assigned in " + ", ".join(HEART)
CALLABLES = "callables passed to constructors in " + ", ".join(HEART)
JOB_FIELDS = "fields of UpdateJob assigned after construction"
LINES = "lines of infinity/"
FILES = "files of infinity/"
SHORT_FILES = f"files of infinity/ under {SHORT} lines"
WORDS = "words of docs/design.md"
COMMENTS = "own-line comments in " + ", ".join(COMMENTED) + ", per 1,000 lines"

# Limits follow improvements; a commit that loosens one gives the reason.
LIMITS: dict[str, int] = {
    ASSIGNED: 42,
    CALLABLES: 0,
    JOB_FIELDS: 0,
    LINES: 60_875,
    FILES: 326,
    SHORT_FILES: 43,
    WORDS: 4_000,
    COMMENTS: 30,
}
LEAST = {COMMENTS}
"""Counts whose limit is the smallest value."""


def count(root: Path) -> dict[str, int]:
    """Return each count of the checkout at `root`."""
    package = root / "infinity"
    heart = [ast.parse(path.read_text(encoding="utf-8")) for room in HEART for path in _files(package / room)]
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in _files(package)]
    return {
        ASSIGNED: sum(1 for tree in heart for _ in assigned_from_outside(tree)),
        CALLABLES: sum(1 for tree in heart for _ in callable_arguments(tree)),
        JOB_FIELDS: len(
            {target.attr for tree in heart for target in assigned_from_outside(tree) if _is_job(target.value)}
        ),
        LINES: sum(sizes),
        FILES: len(sizes),
        SHORT_FILES: sum(size < SHORT for size in sizes),
        WORDS: len((root / "docs" / "design.md").read_text(encoding="utf-8").split()),
        COMMENTS: comments([path for room in COMMENTED for path in _files(package / room)]),
    }


def assigned_from_outside(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each attribute that a statement assigns or deletes on an object other than `self` and `cls`."""
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute):
                owner = target.value
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    yield target


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        waiting = [*node.targets]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        waiting = [node.target]
    else:
        return
    while waiting:
        target = waiting.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            waiting += target.elts
        elif isinstance(target, ast.Starred):
            waiting.append(target.value)
        else:
            yield target


def callable_arguments(tree: ast.AST) -> Iterator[ast.arg]:
    """Yield each argument of an `__init__` whose annotation names a Callable."""
    for kind in ast.walk(tree):
        for method in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                for argument in (*method.args.args, *method.args.kwonlyargs):
                    if argument.annotation is not None and "Callable" in ast.unparse(argument.annotation):
                        yield argument


def _is_job(owner: ast.expr) -> bool:
    """Return True for a variable or an attribute named `job`."""
    return ast.unparse(owner).rpartition(".")[2] == "job"


def comments(paths: list[Path]) -> int:
    """Return the lines of `paths` that are comments alone, per 1,000 lines."""
    alone = total = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        total += len(text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            alone += token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    return round(1000 * alone / total) if total else 0


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def beyond(name: str, value: int) -> bool:
    """Return True if `value` breaks the limit of `name`."""
    return value < LIMITS[name] if name in LEAST else value > LIMITS[name]


def main(arguments: list[str]) -> int:
    counts = count(Path(arguments[0] if arguments else "."))
    for name, value in counts.items():
        verdict = f"  beyond the limit, {LIMITS[name]:,}" if beyond(name, value) else ""
        print(f"{value:7,}  {name}{verdict}")
    return any(beyond(name, value) for name, value in counts.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
