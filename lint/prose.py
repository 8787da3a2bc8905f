"""Finds docstrings, comments and messages that begin with a word that hides their subject.

    python lint/prose.py infinity bench tests examples docs csrc

"What a config asks for", "Of every file", "Whether it ran" and "Those that arrived" have no subject or no verb. Text
begins with a noun or a verb instead; see the part on prose in CONTRIBUTING.md. Exits with 1 if any are found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_BEGINS = re.compile(r"\s*(What|Of|Whether|Those)\b(?!\.)")
_CPP_COMMENT = re.compile(r"^\s*//+ ?(.*)$")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring, comment or message of `path` that begins so."""
    text = path.read_text(encoding="utf-8")
    found = _in_python(text) if path.suffix in (".py", ".pyi") else _in_cpp(text)
    yield from ((line, said) for line, said in found if _BEGINS.match(said))


def _in_python(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value  # a docstring, of an attribute too
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                yield from _message(argument)
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = token.line[:column].strip() == ""
            if not (alone and line == previous + 1):  # the first line of a comment
                yield line, token.string.lstrip("#:")
            previous = line if alone else -1


def _message(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from _message(node.values[0])


def _in_cpp(text: str) -> Iterator[tuple[int, str]]:
    previous = False
    for number, line in enumerate(text.splitlines(), 1):
        comment = _CPP_COMMENT.match(line)
        if comment and not previous:
            yield number, comment[1]
        previous = comment is not None


def main(arguments: list[str]) -> int:
    count = 0
    for argument in arguments:
        for path in sorted(Path(argument).rglob("*")):
            if path.suffix in (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh"):
                for line, said in findings(path):
                    count += 1
                    print(f"{path}:{line}: begins with {said.split()[0]!r}: {said.strip().splitlines()[0][:90]}")
    return count > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
