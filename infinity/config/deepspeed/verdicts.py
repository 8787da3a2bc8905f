"""Verdicts on DeepSpeed's keys: honoured, mapped to a key of ours, without effect here, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Verdict(str, Enum):
    """Effect of a DeepSpeed key here."""

    HONOURED = "honoured"
    """The schema has the key."""
    MAPPED = "mapped"
    """The key sets another key of the schema, which a line of the log names."""
    NO_EFFECT = "no effect"
    """The results are the same without it. A line of the log names it, and `infinity.strict` makes it an error."""
    REFUSED = "refused"
    """An error: without it the result or the memory would differ."""


class Entry(NamedTuple):
    """The verdict on one key, or on a section with all of its keys."""

    verdict: Verdict
    text: str
    """Target of a mapped key; reason and fix of any other."""
    neutral: tuple[object, ...] = ()
    """Values accepted without a note: DeepSpeed's defaults. Values that switch a feature off are neutral, too."""
    false_is_off: bool = True
    """False: `false` asks for something."""
    whole: bool = False
    """The entry covers all keys of the section."""
    presence_is_on: bool = False
    """The section asks for something even if it is empty."""

    def is_neutral(self, value: object) -> bool:
        """Return whether `value` asks for nothing."""
        if self.presence_is_on:
            return value is None or value is False or (isinstance(value, Mapping) and value.get("enabled") is False)
        return value in self.neutral or (is_off(value) and (self.false_is_off or value is not False))


def is_off(value: object) -> bool:
    """Return whether `value` switches off: null, false, an empty section, or one that is not enabled.

    A section that "auto" enables is off: nobody asked for it.
    """
    if value is None or value is False:
        return True
    if isinstance(value, Mapping):
        enabled = value.get("enabled")
        return is_off(enabled) or enabled == "auto" if "enabled" in value else all(map(is_off, value.values()))
    return value == []


def mapped(target: str, *neutral: object) -> Entry:
    return Entry(Verdict.MAPPED, target, neutral)


def no_effect(why: str, *neutral: object, whole: bool = False) -> Entry:
    return Entry(Verdict.NO_EFFECT, why, neutral, whole=whole)


def refused(
    why: str, *neutral: object, false_is_off: bool = True, whole: bool = False, presence_is_on: bool = False
) -> Entry:
    return Entry(Verdict.REFUSED, why, neutral, false_is_off, whole, presence_is_on)
