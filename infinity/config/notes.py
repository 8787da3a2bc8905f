"""Notes on the translation of DeepSpeed's keys, and the two dialects of a configuration."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

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
