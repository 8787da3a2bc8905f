"""The verdict on any key of DeepSpeed: from the schema, or from the table of other keys."""

from __future__ import annotations

from typing import NamedTuple

from infinity.config.deepspeed.keys import TABLE
from infinity.config.deepspeed.verdicts import Verdict
from infinity.config.keys import walk
from infinity.config.sections import Config


class Ruling(NamedTuple):
    """The verdict on a key, and its reason or target."""

    verdict: Verdict
    text: str


def ruling(dotted: str) -> Ruling | None:
    """Return the verdict on the key `dotted` of DeepSpeed; None for an unknown key."""
    if dotted in TABLE:
        return Ruling(TABLE[dotted].verdict, TABLE[dotted].text)
    if any(key.dotted == dotted for key in walk(Config)):
        return Ruling(Verdict.HONOURED, "")
    section = dotted.rpartition(".")[0]
    while section:
        if section in TABLE and TABLE[section].whole:
            return Ruling(TABLE[section].verdict, TABLE[section].text)
        section = section.rpartition(".")[0]
    return None
