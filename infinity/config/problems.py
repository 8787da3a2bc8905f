"""Translates pydantic's errors into one line each: the full name of the key, the problem and the fix.

Lists the keys of a configuration from its models, for the suggestions of `problems` and for `reference`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, NamedTuple, Union

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from infinity.config.deepspeed.keys import TABLE, VALUES
from infinity.inputs import show


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


_MOST = 100
"""Largest number of errors that are translated: the nearest names are searched for each unknown key."""


def problems(error: ValidationError, model: type[BaseModel], content: Mapping[Any, Any]) -> list[str]:
    """Return one line for each error in `error`, in the order in which `model` declares its keys."""
    lines = []
    details = error.errors(include_url=False)
    for detail in details[:_MOST]:
        dotted = _dotted(detail["loc"], content)
        if detail["type"].startswith("union_tag"):
            dotted += f".{detail['ctx']['discriminator'].strip(chr(39))}"
        if detail["type"] == "extra_forbidden":
            lines += _unknown(dotted, detail["input"], model)
        else:
            text = _sentence(detail, dotted)
            # The texts of errors about several keys contain their names.
            lines += [f"{dotted}: {text}"] if dotted else text.splitlines()
    if len(details) > _MOST:
        lines.append(f"and {len(details) - _MOST:,} problems more")
    return lines


def conflicts(error: ValidationError, model: type[BaseModel], content: Mapping[Any, Any]) -> list[str]:
    """Return the lines on keys that depend on each other, which `model` checks once each key is valid.

    error: of `content`. The keys that it names are left out. Their defaults may conflict with others, so a line that
    has the name of such a key or of its section is dropped.
    """
    rest = _sections_of(content)
    wrong: set[str] = set()
    for detail in error.errors(include_url=False)[:_MOST]:
        if not (dotted := _dotted(detail["loc"], content).partition("[")[0]):
            return []  # one on keys together
        *sections, name = dotted.split(".")
        section: Any = rest
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(name, None)
        wrong.update([*sections, name])
    try:
        model.model_validate(rest)
    except ValidationError as again:
        together = [detail for detail in again.errors(include_url=False) if not detail["loc"]]
        lines = [line for detail in together for line in _sentence(detail, "").splitlines()]
        return [line for line in lines if not any(name in line for name in wrong)]
    return []


def _sections_of(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of the sections. Values stay as they are: a wrong one may be any object."""
    return {key: _sections_of(value) if isinstance(value, Mapping) else value for key, value in content.items()}


def _unknown(dotted: str, value: object, model: type[BaseModel]) -> list[str]:
    """Return the error lines for `dotted`, which the schema lacks: a key, or a section of DeepSpeed with keys."""
    if dotted not in TABLE:
        return [unknown_key(dotted, model)]
    if not isinstance(value, Mapping):  # its keys that are known have been translated
        return [f"{dotted}: must be a section, {{ … }}, not {show(value)}"]
    return [unknown_key(f"{dotted}.{name}", model) for name in value]


def unknown_key(dotted: str, model: type[BaseModel]) -> str:
    """Return the error line for the unknown key `dotted`, with the most similar known keys."""
    section, _, name = dotted.rpartition(".")
    known = list(dict.fromkeys(key.dotted for key in walk(model)))
    if dotted in known:
        return f"{dotted}: not a key of this {section.rpartition('.')[0]}.type"
    known += TABLE
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    return f"{dotted}: unknown key; {_meant(section, name, siblings, known)}"


_SYNONYMS = {
    "learning_rate": "lr",
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "betas"),
    **dict.fromkeys(("epsilon", "adam_epsilon"), "eps"),
    **dict.fromkeys(("decay", "wd", "l2"), "weight_decay"),
}
"""Other libraries' names of keys, which may look unlike ours."""


def _meant(section: str, name: str, siblings: Mapping[str, str], known: Sequence[str]) -> str:
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if section in elsewhere:
        return f"it is in a section of that name already: move its keys up into {section}"
    if elsewhere:
        return f"a key of that name is {_alternatives(elsewhere)}"
    if (ours := _SYNONYMS.get(name.lower())) is not None and (
        same := [siblings[ours]] if ours in siblings else [key for key in known if key.rpartition(".")[2] == ours]
    ):
        return f"the nearest is {_alternatives(same)}"
    near = difflib.get_close_matches(name.lower(), siblings, n=1)
    if near:
        return f"the nearest is {siblings[near[0]]}"
    far = difflib.get_close_matches(name.lower(), [key.rpartition(".")[2] for key in known], n=1, cutoff=0.75)
    if far:
        return f"the nearest is {_alternatives([key for key in known if key.rpartition('.')[2] == far[0]])}"
    return f"known here: {', '.join(name for name, key in siblings.items() if key not in TABLE)}"


def _dotted(loc: Sequence[int | str], value: Any) -> str:
    """Return the full name of the key at `loc`, without the names of union members that pydantic inserts."""
    name = ""
    for depth, part in enumerate(loc):
        if isinstance(value, Mapping):
            if part not in value and depth < len(loc) - 1:
                continue
            name += f".{part}"
            value = value.get(part)
        else:
            name += f"[{part}]"
            value = None
    return name.removeprefix(".")


def _sentence(detail: Any, dotted: str) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "union_tag_invalid":
        value = value[context["discriminator"].strip(chr(39))]
    if isinstance(value, str) and value == "auto":
        return '"auto" is not a value of this key; set one, or omit the key for the default'
    if kind == "value_error":
        return str(context["error"])
    if kind in ("missing", "union_tag_not_found"):
        return "is missing"
    expected = _expected(kind, context)
    if expected is None:
        return f"{detail['msg']}, not {show(value)}"
    why = f"; {VALUES[dotted]}" if dotted in VALUES else ""
    return f"must be {expected}, not {show(value)}{why}"


def _expected(kind: str, context: Mapping[str, Any]) -> str | None:
    bounds = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}
    bounds["less_than_equal"] = "at most"
    if kind in bounds:
        bound = next(iter(context.values()))
        return f"{bounds[kind]} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind in ("literal_error", "union_tag_invalid"):
        names = str(context.get("expected") or context["expected_tags"]).replace("'", '"')
        return names if " or " in names else " or ".join(names.rsplit(", ", 1))
    if kind.startswith("int_"):
        return "a whole number"
    if kind.startswith(("float_", "finite_number")):
        return "a number"
    if kind.startswith("bool_"):
        return "true or false"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "a section, { … }"
    if kind in ("tuple_type", "too_long", "too_short"):
        return "a list of two numbers"
    return None


def _alternatives(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
