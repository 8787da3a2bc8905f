"""Reads and validates a configuration from a dict or a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from infinity.config.problems import problems
from infinity.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_config(model: type[ConfigT], source: Mapping[str, Any] | str | Path) -> ConfigT:
    """Validate `source`, a dict or the path of a JSON file, as `model`.

    Raises ConfigError with one line for each problem; each line starts with the file's path, if `source` is a path.
    """
    if isinstance(source, Mapping):
        content, prefix = dict(source), ""
    elif isinstance(source, (str, Path)):
        content, prefix = _read(Path(source)), f"{source}: "
    else:
        raise ConfigError(f"a configuration is a dict or the path of a JSON file, not {type(source).__name__}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = [prefix + line for line in problems(error, model, content)]
    raise ConfigError(lines)  # outside the handler, without pydantic's error as its context


def _read(path: Path) -> dict[str, Any]:
    if str(path).lstrip().startswith("{"):
        raise ConfigError(
            "a configuration is a dict or the path of a JSON file, not a string of JSON: pass json.loads(text)"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder: pass the path of the JSON file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as configuration: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        if _is_yaml(path, text):
            raise ConfigError(
                f"{path}: is YAML, and a configuration is JSON: pass yaml.safe_load(open({str(path)!r})), which is a "
                "dict, or convert the file"
            ) from None
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except _DuplicateKey as error:
        raise ConfigError(f"{path}: the key {error} is duplicated in one section; remove one") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold one JSON object, {{ … }}, not a {type(content).__name__}")
    return content


def _is_yaml(path: Path, text: str) -> bool:
    """Return True if `path` ends in .yaml or .yml, or the first line of content in `text` is `key:` or `key: value`."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return True
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---")))
    return re.match(r"[A-Za-z_][\w-]*:(\s|$)", next(lines, "")) is not None


class _DuplicateKey(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict, and raise for duplicate keys, of which json would silently use the last."""
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise _DuplicateKey(key)
        section[key] = value
    return section
