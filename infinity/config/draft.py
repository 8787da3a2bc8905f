"""A configuration while it is being translated: nested dicts by dotted names, the draft, and notes for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from infinity.config.fields import show

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


Dialect: TypeAlias = Literal["infinity", "deepspeed"]
"""Defaults of absent keys and the meaning of `Adam`: this library's or DeepSpeed's."""


class Notes(NamedTuple):
    """Keys that a configuration contains and the schema lacks. Each entry is one phrase."""

    mapped: tuple[str, ...] = ()
    """Keys that set others, as "key value → key value"."""
    ignored: tuple[str, ...] = ()
    """Full names of keys without effect."""
    defaults: tuple[str, ...] = ()
    """Full names of keys that are "auto" without a known value."""
    dotted: tuple[str, ...] = ()
    """Full names that are keys of the top level, where neither this library nor DeepSpeed reads them."""

    def line(self) -> str:
        """Return all notes in one line; "" without any."""
        parts = (
            ("mapped", self.mapped),
            ('"auto" without a value, so default', self.defaults),
            ("no effect here (docs/config.md says why)", self.ignored),
            ("ignored, as in DeepSpeed, since full names with dots are not keys of the top level", self.dotted),
        )
        return "; ".join(f"{title}: {', '.join(phrases)}" for title, phrases in parts if phrases)


@dataclass
class Draft:
    """Content with keys of DeepSpeed and of the schema, and notes for the user."""

    content: dict[Any, Any]
    dialect: Dialect
    mapped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    dotted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, dotted: str) -> Any:
        """Remove `dotted` and return its value, or ABSENT."""
        value = look(self.content, dotted)
        drop(self.content, dotted)
        return value

    def has(self, dotted: str) -> bool:
        return look(self.content, dotted) is not ABSENT

    def is_true(self, dotted: str) -> bool:
        return look(self.content, dotted) is True

    def default(self, dotted: str, value: object) -> None:
        """Set `dotted` to `value` if it is absent."""
        if not self.has(dotted):
            put(self.content, dotted, value)

    def map(self, source: str, value: object, target: str, result: object, *, places: bool = False) -> None:
        """Set `target` to `result`, because `source` is `value`. A target that is set already wins.

        places: the keys place states, so that another value of `target` is a problem.
        """
        if self.has(target):
            present = look(self.content, target)
            if places and present != result:
                self.problems.append(
                    f"{source}: {_short(value)} sets {target} to {_short(result)}, which is set to {_short(present)}: "
                    "remove one of them"
                )
                return
            self.ignore(source, f"{target} is set and decides")
            return
        put(self.content, target, result)
        self.mapped.append(f"{source} {_short(value)} → {target} {_short(result)}")

    def ignore(self, dotted: str, why: str) -> None:
        """Note that `dotted` has no effect; with `infinity.strict`, that is a problem."""
        if self.is_true("infinity.strict"):
            self.problems.append(f"{dotted}: has no effect here, and infinity.strict is true: {why}; remove it")
        else:
            self.ignored.append(dotted)

    def refuse(self, dotted: str, value: object, why: str) -> None:
        self.problems.append(f"{dotted}: {show(value)} is not supported; {why}")


def _short(value: object) -> str:
    """Return `value` for a note: whole numbers without a fraction, text without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else show(value)
