"""Kinds that an engine refuses, always or in many combinations: drawn seldom, so that most cases train to the end."""

from __future__ import annotations

from fuzz.draw import Draw, flag

ONCE_IN = 8
"""Draws of such a kind of which one is kept."""
_ASSIGNED = ("assign", "assign view")
PARTS = {
    *(("shared memory", each) for each in ("two parameters", "buffer", "overlapping", "data of another")),
    *(("shared memory", each) for each in ("plain tensor", "part of another")),
    ("kept view", "from init"),
    ("kept view", "from init detached"),
    ("complex", "trained"),
    ("derivative", "functional grad"),
    ("derivative", "vjp"),
    ("functional", "linearised"),
    ("power iteration", "data"),
    ("average", "centred"),
    *(("edited before use", each) for each in _ASSIGNED),
    *(("edited after use", each) for each in _ASSIGNED),
    *(("edited by hook", each) for each in _ASSIGNED),
}
EVENTS = {"by hand", "copy", "unfreeze", "assign data", "drop"}
"""Some of them are refused by what else is in the case."""


def other_part(draw: Draw, kind: str, variant: str, variants: tuple[str, ...]) -> tuple[str, str]:
    """(kind, variant), or another in its place. variants: of this kind."""
    if (kind, variant) not in PARTS or flag(draw, ONCE_IN):
        return kind, variant
    left = [each for each in variants if (kind, each) not in PARTS]
    return (kind, draw.choice(left)) if left else ("kept view", draw.choice(("flat", "detached", "rows", "data")))


def other_event(draw: Draw, kind: str) -> str:
    """The event, or another in its place."""
    if kind not in EVENTS or flag(draw, ONCE_IN):
        return kind
    return draw.choice(("read", "read state_dict", "evaluate", "edit no_grad", "set lr"))
