"""Lists the keys of a configuration from its models, for the suggestions of `problems` and for `reference`."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, NamedTuple, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Key(NamedTuple):
    """A key: its full dotted name, the model that declares it, and its field."""

    dotted: str
    model: type[BaseModel]
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.dotted.rpartition(".")[2]

    @property
    def description(self) -> str:
        """The field's description, or the docstring under it in the source of the class that declares it; "" without
        one.
        """
        if self.field.description is not None:
            return self.field.description
        declared_in = next(cls for cls in self.model.__mro__ if self.name in inspect.get_annotations(cls))
        return _docstrings(declared_in).get(self.name, "")


@cache
def _docstrings(model: type) -> dict[str, str]:
    """Return field → the docstring under it, for the fields that `model` itself declares."""
    (definition,) = ast.parse(dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that `annotation` admits: itself, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return models_in(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for member in typing.get_args(annotation) for model in models_in(member)]
    return []


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of `model`, a section before its keys. A key of several union members comes once for each."""
    for name, field in model.model_fields.items():
        yield Key(prefix + name, model, field)
        for inner in models_in(field.annotation):
            yield from walk(inner, f"{prefix}{name}.")
