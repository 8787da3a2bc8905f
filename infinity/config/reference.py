"""Generates docs/config.md from the models that parse the configuration."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infinity.config.deepspeed.keys import TABLE, Entry, Verdict
from infinity.config.deepspeed.translate import DEFAULTS, OF_OPTIMIZER, OF_SCHEDULER
from infinity.config.fields import IN_BYTES
from infinity.config.problems import Key, models_in, walk
from infinity.config.sections import Config
from infinity.inputs import show
from infinity.sizes import format_size

_HEAD = """\
# Configuration

`infinity.initialize(model=…, config=…)` takes a dict or the path of a JSON file with the keys below. Every key has a
default unless marked *required*; a batch size alone is a complete configuration. Sizes are in bytes: a number, or text
such as `"64MiB"` (1024-based) or `"1.5GB"` (1000-based). An unknown key is an error that suggests the most similar one.
A value of another type is an error, too. All problems are reported at once, also those of keys that depend on each
other, unless one of these or its section has a mistake. A file may be Hjson, with comments and trailing commas, if the
package hjson is installed.

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
ranks. Set two of them, or one of the first two; the rest is derived. Sizes that do not multiply are an error.
"""

_DEEPSPEED_HEAD = """\
## DeepSpeed's keys

A configuration may have any key of DeepSpeed 0.19.8, and older ones. The tables above have the supported keys. Each
other key has one of three verdicts: *mapped* to a key of this page, *no effect* on results here, or *refused* with an
error, since ignoring the key would change the result or the memory. A row for a section covers all its keys.

Null, values that switch a feature off and the values in parentheses are always accepted. A line of the log lists the
keys that were mapped or had no effect; `"infinity": {"strict": true}` makes a key without effect an error.

### Values of `"auto"`

`Config.load(source, fill=Fill(lr=…, train_micro_batch_size_per_gpu=…))` replaces `"auto"` by values of the script, as
Accelerate and transformers' Trainer do. Without a value the key has its default, and a line of the log names the key.
Batch sizes and `scheduler.params.total_num_steps` have no default: an error names the key.

### Two dialects

`Config.load(source, dialect="deepspeed")` gives absent keys DeepSpeed's defaults:

"""

_VERDICTS_HEAD = """
`Adam` has decoupled weight decay in the dialect "deepspeed" and L2 decay in "infinity"; `adam_w_mode` decides in both.

### Verdicts

| key | verdict | reason or target |
|---|---|---|
"""


def reference() -> str:
    """Return the text of docs/config.md."""
    parts = [_HEAD]
    for title, keys in _groups():
        rows = [_row(key) for key in keys]
        parts.append("\n".join([f"## {title}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]))
    parts.append(_DEEPSPEED_HEAD + _dialect_table())
    parts.append(_VERDICTS_HEAD.lstrip("\n") + "".join(_verdict(key, entry) for key, entry in TABLE.items()))
    return "\n".join(parts)


def write(path: Path) -> bool:
    """Write the reference to `path`; return False if it was up to date."""
    text = reference()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _groups() -> Iterator[tuple[str, list[Key]]]:
    """Yield (title, keys) of each table: the top level, then each section, or each member of a section's union."""
    yield "Top level", [key for key in walk(Config) if "." not in key.dotted]
    for name, field in Config.model_fields.items():
        members = models_in(field.annotation)
        for member in members:
            kind = typing.get_args(member.model_fields["type"].annotation)[0] if len(members) > 1 else None
            leaves = [key for key in walk(member, f"{name}.") if not models_in(key.field.annotation)]
            yield f"`{name}`" + (f" with type `{kind}`" if kind else ""), leaves


def _row(key: Key) -> str:
    cells = (f"`{key.dotted}`", _type(key.field), _default(key.field), key.description)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _dialect_table() -> str:
    """Return the defaults that differ between the dialects."""
    rows = dict(DEFAULTS)
    for section, kinds in (("optimizer", OF_OPTIMIZER), ("scheduler", OF_SCHEDULER)):
        for kind, defaults in kinds.items():
            rows |= {f"{section}.params.{name}` of `{kind}": value for name, value in defaults.items()}
    lines = ("| key | default in DeepSpeed |", "|---|---|", *(f"| `{k}` | `{show(v)}` |" for k, v in rows.items()))
    return "\n".join([*lines, ""])


def _verdict(key: str, entry: Entry) -> str:
    values = ", ".join(f"`{value:g}`" if isinstance(value, float) else f"`{show(value)}`" for value in entry.neutral)
    text = f"`{entry.text}`" if entry.verdict is Verdict.MAPPED else entry.text
    return f"| `{key}` | {entry.verdict.value} | {_cell(text)}{f' ({values})' if values else ''} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return "section"
    return _with_bounds(_name(field.annotation), field.metadata)


def _name(annotation: Any) -> str:
    """Return the name of the type `annotation` in the tables."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(annotation) is typing.Annotated:
        return _with_bounds(_name(arguments[0]), list(arguments[1:]))
    if typing.get_origin(annotation) is tuple:
        if arguments[-1] is Ellipsis:
            name = _name(arguments[0])
            # fields.Folders also takes one path without a list.
            return f"{name} or list of {name}s" if arguments[0] is Path else f"list of {name}s"
        return f"list of {len(arguments)}: {_name(arguments[0])}"
    if arguments:
        return " or ".join(_name(member) for member in arguments if member is not type(None))
    return {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}[annotation]


def _with_bounds(name: str, metadata: list[Any]) -> str:
    constraints = [c for item in metadata for c in getattr(item, "metadata", [item])]
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bound = format_size if IN_BYTES in metadata else _bound
    bounds = [f"{sign} {bound(getattr(c, a))}" for a, sign in signs for c in constraints if hasattr(c, a)]
    return " ".join(["size" if IN_BYTES in metadata else name, ", ".join(bounds)]).rstrip()


def _bound(value: float) -> str:
    """Return a bound: 2^64 for a large power of two, and 6 digits otherwise."""
    is_power = value > 1 << 20 and math.log2(value).is_integer()
    return f"2^{math.log2(value):g}" if is_power else f"{value:g}"


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
    if value == "":
        return '`""`'
    return f"`{list(value) if isinstance(value, tuple) else value}`"
