"""Reads and validates a configuration from a dict or a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from infinity.config.deepspeed.translate import translate
from infinity.config.draft import Dialect, Fill, Notes
from infinity.config.problems import conflicts, problems, walk
from infinity.errors import ConfigError
from infinity.inputs import check_depth, parse_json, read_input, without_duplicates

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_COMMENTS = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
"""Comments of Hjson, outside of text. One without an end takes the rest, which is searched once then."""
_LARGEST = 1 << 20
"""Bytes of a file."""


def load_config(
    model: type[ConfigT], source: Mapping[str, Any] | str | PathLike[str], dialect: Dialect, fill: Fill
) -> tuple[ConfigT, Notes]:
    """Translate `source`, a dict or the path of a JSON file, and validate it as `model`.

    Raises ConfigError with one line for each problem; each line starts with the file's path, if `source` is a path.
    """
    if isinstance(source, Mapping):
        content, prefix = dict(source), ""
    elif isinstance(source, (str, PathLike)):
        content, prefix = read_content(Path(source)), f"{source}: "
    else:
        raise ConfigError(f"a configuration is a dict or the path of a JSON file, not {type(source).__name__}")
    try:
        check_depth(content)
    except ValueError as error:
        raise ConfigError(prefix + str(error)) from None
    lines = [f"{key}: {text!r} has a character that UTF-8 has no bytes for" for key, text in _unencodable(content)]
    if lines:
        raise ConfigError([prefix + line for line in lines])
    translation = translate(content, frozenset(key.dotted for key in walk(model)), dialect, fill)
    lines = translation.problems
    try:
        config = model.model_validate(translation.content)
    except ValidationError as error:
        named = {line.partition(": ")[0] for line in lines}  # such as a required key that was "auto"
        found = problems(error, model, translation.content)
        found += [line for line in conflicts(error, model, translation.content) if line not in found]
        lines = [*(line for line in found if line.partition(": ")[0] not in named), *lines]
    else:
        if not lines:
            return config, translation.notes
    raise ConfigError([prefix + line for line in lines])  # outside the handler, without pydantic's error as its context


def _unencodable(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in `value`, names of keys too, that are no UTF-8, with their dotted keys.

    "\\ud800" in JSON makes one, and os.listdir of a name that is no UTF-8.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield repr(key)[1:-1], value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            dotted = f"{key}.{name}" if key else str(name)
            yield from _unencodable(name, dotted)
            yield from _unencodable(inner, dotted)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _unencodable(inner, f"{key}[{number}]")


def read_content(path: Path) -> dict[str, Any]:
    """Return the object in a JSON or Hjson file. Raises ConfigError."""
    if str(path).lstrip().startswith("{"):
        raise ConfigError(
            "a configuration is a dict or the path of a JSON file, not a string of JSON: pass json.loads(text)"
        )
    try:
        text = read_input(path, _LARGEST).decode("utf-8-sig")
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder: pass the path of the JSON file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as configuration: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    try:
        content = _parse(text)
    except json.JSONDecodeError as error:
        if _is_yaml(path, text):
            raise ConfigError(
                f"{path}: is YAML, and a configuration is JSON: pass yaml.safe_load(open({str(path)!r})), which is a "
                "dict, or convert the file"
            ) from None
        is_hjson = path.suffix.lower() == ".hjson" or _COMMENTS.search(text) is not None
        hint = ". To read Hjson, pip install hjson" if is_hjson and not find_spec("hjson") else ""
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: is not JSON: {error.msg}{hint}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold one JSON object, {{ … }}, not a {type(content).__name__}")
    return content


def _parse(text: str) -> Any:
    """Return the value of `text`, JSON or Hjson. Raises ValueError, such as json.JSONDecodeError."""
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        content = _read_hjson(text)
        if content is None:
            raise
        return content


def _read_hjson(text: str) -> dict[str, Any] | None:
    """Return the object in `text`, JSON with comments and trailing commas; None if it is none or hjson is missing."""
    try:
        import hjson
    except ImportError:
        return None
    if not _COMMENTS.sub("", text).lstrip().startswith("{"):  # Hjson without braces looks like YAML
        return None
    try:
        content = hjson.loads(text, object_pairs_hook=without_duplicates)
    except (hjson.HjsonDecodeError, RecursionError):
        return None
    check_depth(content)
    return content if isinstance(content, dict) else None


def _is_yaml(path: Path, text: str) -> bool:
    """Return True if `path` ends in .yaml or .yml, or the first line of content in `text` is `key:` or `key: value`."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return True
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---")))
    return re.match(r"[A-Za-z_][\w-]*:(\s|$)", next(lines, "")) is not None
