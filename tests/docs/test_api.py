"""Every public attribute and method has a docstring, and every public name is in docs/api.md."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.config import Batch
from infinity.engine.optimizer import UnitOptimizer
from infinity.observe.ledger import Ledger, Snapshot
from infinity.optim import CPUAdam

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
CLASSES = [
    infinity.Engine,
    infinity.InferenceEngine,
    infinity.Init,
    infinity.GatheredParameters,
    infinity.Config,
    Batch,
    UnitOptimizer,
    CPUAdam,
    Ledger,
    Snapshot,
]
OF_TORCH = {"add_param_group"}
"""Methods that override torch's, whose contract holds."""


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        yield from (body for name in ("body", "orelse") if isinstance(body := getattr(node, name, None), list) and body)


def undocumented(of: type[Any]) -> Iterator[str]:
    """Yield the public attributes and methods that `of` defines without a docstring, those of our base classes too.

    Fields of dataclasses whose class docstring names them, and those of pydantic models, are documented elsewhere.
    """
    for cls in of.__mro__:
        if not cls.__module__.startswith("infinity") or "model_fields" in vars(cls):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in OF_TORCH:
                is_setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
                if not is_setter and ast.get_docstring(node) is None:
                    yield f"{cls.__name__}.{node.name}()"
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                yield from (f"{cls.__name__}.{name}" for name in _bare_attributes(node))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                follows = tree.body[(tree.body.index(node) + 1) % len(tree.body)]
                name = node.target.id
                if not name.startswith("_") and not _is_text(follows) and name not in (cls.__doc__ or ""):
                    yield f"{cls.__name__}.{name}"


def _bare_attributes(constructor: ast.FunctionDef) -> Iterator[str]:
    for body in _bodies(constructor):
        for statement, follows in zip(body, [*body[1:], ast.Pass()], strict=True):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute) and not target.attr.startswith("_") and not _is_text(follows):
                    yield target.attr


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("of", CLASSES, ids=lambda cls: cls.__name__)
def test_public_members_have_docstrings(of: type[Any]) -> None:
    assert inspect.getdoc(of)
    assert list(undocumented(of)) == []


@pytest.mark.parametrize("name", sorted(set(infinity.__all__) - {"InfinityError"}))
def test_a_public_name_is_in_the_reference(name: str) -> None:
    """The reference names the object's home, from which the site takes its docstring."""
    home = getattr(infinity, name)
    assert inspect.getdoc(home)
    assert re.search(rf"^::: {re.escape(home.__module__)}\.{home.__name__}$", PAGE, re.MULTILINE)
    assert f"heading: infinity.{name}" in PAGE


def test_every_reference_names_an_object() -> None:
    for path in re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE):
        module, _, name = path.rpartition(".")
        if path != "infinity.errors":
            assert hasattr(__import__(module, fromlist=[name]), name), path
