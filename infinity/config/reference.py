"""docs/config.md, written from the models: what is documented is what is read."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infinity.config.fields import IN_BYTES
from infinity.config.keys import Key, models_in, walk
from infinity.config.rejected_keys import FOREIGN
from infinity.config.sections import Config
from infinity.sizes import format_size

_HEAD = """\
# Configuration

Written by `python -m infinity.config`; edit the docstrings in `infinity/config/` and run it again.

`infinity.initialize(model=…, config=…)` takes a dict or the path of a JSON file with the keys below. Every key has a
default unless it says *required*; a batch size alone is a configuration. Sizes are bytes: a number, or text such as
`"64MiB"` (1024-based) or `"1.5GB"` (1000-based). A key that is not listed is an error that names the nearest one, and a
value of another type is an error too; all problems are reported at once.

```json
{
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}
  }
}
```

The three batch sizes multiply: `train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` ×
ranks. Give two, or one of the first two; the rest is derived, and numbers that do not multiply are an error.
"""

_FOREIGN_HEAD = """\
## Keys of other engines

Known, and refused with these words rather than ignored:

| key | answer |
|---|---|
"""


def reference() -> str:
    """The whole of docs/config.md."""
    parts = [_HEAD]
    for title, keys in _groups():
        rows = [_row(key) for key in keys]
        parts.append("\n".join([f"## {title}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]))
    parts.append(_FOREIGN_HEAD + "".join(f"| `{key}` | {_cell(answer)} |\n" for key, answer in FOREIGN.items()))
    return "\n".join(parts)


def write(path: Path) -> bool:
    """Write the reference to `path`; False when it was up to date."""
    text = reference()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _groups() -> Iterator[tuple[str, list[Key]]]:
    """One table for the top level, one for each section of it; a section of a union comes once for each member."""
    yield "Top level", [key for key in walk(Config) if "." not in key.dotted]
    for name, field in Config.model_fields.items():
        members = models_in(field.annotation)
        for member in members:
            kind = typing.get_args(member.model_fields["type"].annotation)[0] if len(members) > 1 else None
            leaves = [key for key in walk(member, f"{name}.") if not models_in(key.field.annotation)]
            yield f"`{name}`" + (f" with type `{kind}`" if kind else ""), leaves


def _row(key: Key) -> str:
    cells = (f"`{key.dotted}`", _type(key.field), _default(key.field), key.field.description or "")
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return "section"
    return _with_bounds(_name(field.annotation), field.metadata)


def _name(annotation: Any) -> str:
    """What a value of type `annotation` is called."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(annotation) is typing.Annotated:
        return _with_bounds(_name(arguments[0]), list(arguments[1:]))
    if typing.get_origin(annotation) is tuple:
        if arguments[-1] is Ellipsis:  # fields.Folders, which takes one without brackets too
            return f"{_name(arguments[0])} or list of {_name(arguments[0])}s"
        return f"list of {len(arguments)}: {_name(arguments[0])}"
    if arguments:
        return " or ".join(_name(member) for member in arguments if member is not type(None))
    return {bool: "true or false", int: "whole number", float: "number", Path: "path"}[annotation]


def _with_bounds(name: str, metadata: list[Any]) -> str:
    constraints = [c for item in metadata for c in getattr(item, "metadata", [item])]
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bounds = [f"{sign} {getattr(c, a):g}" for a, sign in signs for c in constraints if hasattr(c, a)]
    return " ".join(["size" if IN_BYTES in metadata else name, ", ".join(bounds)]).rstrip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*" if typing.get_origin(field.annotation) is not typing.Literal else "—"
    value = field.get_default()
    if value is None or isinstance(value, BaseModel):
        return "—"
    if IN_BYTES in field.metadata:
        return f"`{format_size(value)}`"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{list(value) if isinstance(value, tuple) else value}`"
