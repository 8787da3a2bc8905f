"""Prints a plan: units and the tier of each state, and the bytes of each tier."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from infinity.plan.layout import UnitLayout
from infinity.plan.placement import State
from infinity.plan.plan import Plan
from infinity.sizes import counted, show_bytes
from infinity.tier_kind import TierKind

_HEAD = ("unit", "parameters", "dtype", "param", "gradient", "master and moments")
_BLOCK = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<number>\d+)(?:\.(?P<inner>.+))?$")
"""Path of a unit in a repeated block: `model.layers.` 0 `mlp`."""


def describe(plan: Plan) -> str:
    """Return a table of units and their states, and the bytes in each tier. Equal consecutive blocks share a line.

    The cells of states have the tier and the bytes of this rank's part. Two cells have neither:
    "-"             a frozen unit has no gradient, master and moments
    "on arrival"    backward passes the gradient to the update. Its tier stores it only while the update has to wait, as
                    in the first step. Its memory or space is listed separately; the totals include it on a device
                    where a budget holds the unit's states.
    """
    rows = [_HEAD, *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    total = sum(layout.parameter_numel for layout in plan.units)
    ranks = f", stage {plan.stage} over {plan.ranks.size} ranks" if plan.ranks.size > 1 else ""
    if plan.ranks.model_parallel > 1:
        ranks = f", tensor parallel over {plan.ranks.model_parallel} ranks{ranks}"
    purpose = f"update {plan.update.replace('_', ' ')}" if plan.update else "for inference"
    if plan.in_forward:
        purpose += f", of {counted(len(plan.in_forward), 'unit')} in the next forward"
    held = plan.nbytes()
    passing = "".join(
        f"; up to {show_bytes(more)} more on {tier} while gradients wait, as in the first step"
        for tier, more in plan.passing.items()
    )
    return "\n".join(
        [
            *lines,
            "",
            f"{counted(len(plan.units), 'unit')}, {total:,} parameters{ranks}; {purpose}",
            "this rank holds " + ", ".join(f"{show_bytes(held[tier])} on {tier}" for tier in TierKind) + passing,
            *_activations(plan),
            *_durable(plan),
        ]
    )


def _activations(plan: Plan) -> Iterator[str]:
    if (moved := plan.activations) is not None:
        yield f"tensors saved for backward, from {show_bytes(moved.min_bytes)}: on {moved.tier}, beside these bytes"


def _durable(plan: Plan) -> Iterator[str]:
    if plan.io is not None and (durable := plan.io.durable) is not None:
        folders = ", ".join(str(folder / durable.run) for folder in plan.io.folders)
        yield f"durable run {durable.run}: two slots of each state in {folders}, {show_bytes(durable.slot_nbytes)}"


@dataclass
class _Row:
    """Units of one block with the same dtype and tiers. nbytes: by state."""

    numel: int = 0
    nbytes: dict[State, int] = field(default_factory=dict)

    def add(self, layout: UnitLayout) -> None:
        self.numel += layout.parameter_numel

    def cells(self, kind: _Kind) -> tuple[str, ...]:
        return (
            f"{self.numel:,}",
            kind.dtype,
            *(
                f"{tier} {show_bytes(self.nbytes[state])}" if state in self.nbytes else tier
                for state, tier in zip(State, kind.tiers, strict=True)
            ),
        )


@dataclass(frozen=True)
class _Kind:
    dtype: str
    tiers: tuple[str, ...]
    """Tier of each state, or a word for a state that is stored nowhere."""


@dataclass(frozen=True)
class _Block:
    """Consecutive units of one repeated block, or a single unit elsewhere."""

    before: str
    number: str
    inner: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for (before, _, rows), alike in groupby(_blocks(plan), key=lambda block: (block.before, block.inner, block.rows)):
        blocks = list(alike)
        name = before + blocks[0].number
        if len(blocks) > 1:
            name += f" … {blocks[-1].number} ({len(blocks)} alike)"
        yield from ((name, *cells) for cells in rows)


def _blocks(plan: Plan) -> Iterator[_Block]:
    for (before, number), members in groupby(plan.units, key=_place):
        layouts = list(members)
        yield _Block(before, number, tuple(map(_inner, layouts)), tuple(_cells(plan, layouts)))


def _place(layout: UnitLayout) -> tuple[str, str]:
    """Return (path before the number, number) of a unit's block; (name, "") for a unit outside of blocks."""
    match = _BLOCK.match(_path(layout))
    return (match["before"], match["number"]) if match else (layout.name, "")


def _inner(layout: UnitLayout) -> str:
    match = _BLOCK.match(_path(layout))
    return match["inner"] or "" if match else ""


def _path(layout: UnitLayout) -> str:
    return layout.name.partition(" (")[0]


def _cells(plan: Plan, layouts: Sequence[UnitLayout]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a block, one row for each kind of units in it."""
    rows: dict[_Kind, _Row] = {}
    for layout in layouts:
        row = rows.setdefault(_kind(plan, layout), _Row())
        row.add(layout)
        for state in State:
            if plan.placement.holds(layout.index, state) and not _passes(plan, layout, state):
                row.nbytes[state] = row.nbytes.get(state, 0) + plan.placement.of(layout.index, state).nbytes
    return (row.cells(kind) for kind, row in rows.items())


def _kind(plan: Plan, layout: UnitLayout) -> _Kind:
    dtype = str(layout.dtype).removeprefix("torch.")
    tiers = []
    for state in State:
        if _passes(plan, layout, state):
            tiers.append("on arrival")
        elif plan.placement.holds(layout.index, state):
            tiers.append(plan.placement.of(layout.index, state).tier)
        else:
            tiers.append("-")
    return _Kind(dtype if layout.trainable else f"{dtype}, frozen", tuple(tiers))


def _passes(plan: Plan, layout: UnitLayout, state: State) -> bool:
    """Return True for gradients that the update consumes as they arrive, so that their extent is rarely used."""
    return state is State.GRAD and layout.trainable and plan.update is not None and plan.policy.grads_pass
