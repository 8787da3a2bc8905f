"""A configuration while it is being translated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infinity.config.fields import show
from infinity.config.notes import Dialect
from infinity.config.tree import ABSENT, drop, look, put


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
