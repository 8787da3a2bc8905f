"""Reads and edits nested dicts by full dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ABSENT: Final = object()
"""Returned for a key that is not there."""


def copied(value: Any) -> Any:
    """Return `value` with every mapping in it replaced by a new dict."""
    return {key: copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def leaves(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every key, a section before its keys. Keys that are not text are left out."""
    for key, value in content.items():
        if isinstance(key, str):
            yield prefix + key, value
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{key}.")


def look(content: Mapping[Any, Any], dotted: str) -> Any:
    """Return the value of `dotted`, or ABSENT."""
    value: Any = content
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def put(content: dict[Any, Any], dotted: str, value: object) -> None:
    """Set `dotted` to `value`. A section that is missing or null is made; one that is no section is left alone."""
    *sections, name = dotted.split(".")
    for part in sections:
        if content.get(part) is None:
            content[part] = {}
        content = content[part]
        if not isinstance(content, dict):
            return
    content[name] = value


def drop(content: dict[Any, Any], dotted: str) -> None:
    """Remove `dotted`, if it is there."""
    section, _, name = dotted.rpartition(".")
    holder = look(content, section) if section else content
    if isinstance(holder, dict):
        holder.pop(name, None)
