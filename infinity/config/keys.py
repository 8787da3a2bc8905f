"""The keys of a configuration, listed from its models: what `problems` suggests and `reference` documents."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Key(NamedTuple):
    """One key: its full dotted name, the model that declares it, its field."""

    dotted: str
    model: type[BaseModel]
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.dotted.rpartition(".")[2]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that `annotation` admits: itself, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return models_in(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for member in typing.get_args(annotation) for model in models_in(member)]
    return []


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key of `model`, sections before the keys in them; a key of several models of a union once for each."""
    for name, field in model.model_fields.items():
        yield Key(prefix + name, model, field)
        for inner in models_in(field.annotation):
            yield from walk(inner, f"{prefix}{name}.")
