"""What the engine says at start: its units and where each state lives."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from infinity.plan.placement import State

if TYPE_CHECKING:
    from infinity.engine.parts import Parts
    from infinity.units.unit import Unit


def human(nbytes: float) -> str:
    """Bytes for people, in decimal units: 12.6 MB."""
    for suffix, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {suffix}"
    return f"{nbytes:.0f} B"


def describe(parts: Parts) -> str:
    """A table: unit, parameters, dtype, and the tier and bytes of each state; then what every tier holds."""
    head = ("unit", "parameters", "dtype", "param", "gradient", "master and moments")
    rows: list[tuple[str, ...]] = [head]
    for cells, alike in groupby(parts.units, key=lambda unit: _cells(parts, unit)):
        units = list(alike)
        name = units[0].name if len(units) == 1 else f"{units[0].name} … {units[-1].name} ({len(units)} alike)"
        rows.append((name, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    total = sum(unit.layout.parameter_numel for unit in parts.units)
    held = parts.tier_bytes()
    lines.append("")
    ranks = f", stage {parts.stage} over {parts.ranks.size} ranks" if parts.ranks.size > 1 else ""
    if parts.ranks.model.size > 1:
        ranks = f" of a model that {parts.ranks.model.size} ranks hold together{ranks}"
    purpose = f"update {parts.update.replace('_', ' ')}" if parts.update else "for inference"
    lines.append(f"{len(parts.units)} units, {total:,} parameters{ranks}; {purpose}")
    lines.append(
        "this rank holds " + ", ".join(f"{human(held[tier])} on {tier}" for tier in ("device", "host", "nvme"))
    )
    return "\n".join(lines)


def _cells(parts: Parts, unit: Unit) -> tuple[str, ...]:
    """What a row says of the unit, its name left out."""
    layout = unit.layout
    param, grad, optim = (_where(parts, unit.index, state) for state in (State.PARAM, State.GRAD, State.OPTIM))
    if layout.trainable and parts.update == "during_backward":
        grad = "as it comes"
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{layout.parameter_numel:,}", dtype if layout.trainable else f"{dtype}, frozen", param, grad, optim


def _where(parts: Parts, unit: int, state: State) -> str:
    if not parts.placement.holds(unit, state):
        return "-"
    extent = parts.placement.of(unit, state)
    return f"{extent.tier} {human(extent.nbytes)}"
