"""docs/troubleshooting.md quotes texts that the package, or torch for the last section, really raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import OpenEngine
from support.models import Linears, vector_batches

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS, TORCHS = PAGE.split("## Errors of PyTorch")
VALUE = "…"
QUOTED = re.compile(r"^### `(.+)`$", re.MULTILINE)


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of `tree`, with … for each value of an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[a-z]", VALUE, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)


@pytest.fixture(scope="module")
def texts() -> str:
    sources = sorted((ROOT / "infinity").rglob("*.py"))
    return "\n".join(text for path in sources for text in _texts(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("quoted", QUOTED.findall(OURS))
def test_a_quoted_text_occurs_in_the_sources(quoted: str, texts: str) -> None:
    assert quoted in texts


def test_every_entry_quotes_a_text_and_none_is_quoted_twice() -> None:
    headings = re.findall(r"^### .*$", PAGE, re.MULTILINE)
    assert len(headings) == len(set(QUOTED.findall(PAGE))) > 30


@pytest.mark.parametrize(("quoted", "bias"), list(zip(QUOTED.findall(TORCHS), (True, False), strict=True)))
def test_torch_reports_two_dtypes_as_quoted(quoted: str, bias: bool, make_engine: OpenEngine) -> None:
    engine = make_engine(Linears(bias=bias), bf16=True)
    (batch,) = vector_batches(1)
    with pytest.raises(RuntimeError, match=quoted):
        engine(*batch)
