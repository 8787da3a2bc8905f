"""Lays out the units of a model: their dtypes, and the order and offsets of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from infinity.comm.dtensor import local
from infinity.config import Config
from infinity.errors import ModelError
from infinity.plan.layout import UnitLayout, layout_unit
from infinity.plan.policy import compute_dtype
from infinity.units.discover import Discovered, discover


def lay_out(
    model: nn.Module,
    config: Config,
    groups: Sequence[dict[str, object]],
    shards: int,
    copies: Callable[[nn.Parameter], int] = lambda parameter: 1,
    dtype: torch.dtype | None = None,
) -> tuple[list[Discovered], list[UnitLayout]]:
    """Return the units of `model` and the layout of each.

    groups: param_groups, which order the slots. shards: number of shards of a unit. copies: parameter → `Slot.copies`.
    dtype: dtype of all floating parameters, instead of the config's. Raises ModelError for dtypes that cannot be
    trained.
    """
    group_of = {
        id(p): number
        for number, group in enumerate(groups)
        for p in group["params"]  # type: ignore[attr-defined]
        if p.requires_grad
    }
    wanted = dtype or compute_dtype(config)
    found = discover(model, config.infinity.unit_size, width=wanted.itemsize if wanted else None)
    layouts: list[UnitLayout] = []
    for index, unit in enumerate(found):
        members = [
            (name, tuple(local(p).shape), group_of.get(id(p), -1))
            for name, p in zip(unit.names, unit.parameters, strict=True)
        ]
        first = layouts[-1].end if layouts else 0
        dtype = _trained_dtype(unit, wanted)
        layouts.append(layout_unit(index, unit.name, members, dtype, unit.trainable, shards, first))
    # A layout orders its slots by param_group; the parameters follow it.
    for index, (unit, layout) in enumerate(zip(found, layouts, strict=True)):
        by_name = dict(zip(unit.names, unit.parameters, strict=True))
        found[index] = replace(
            unit,
            names=tuple(slot.name for slot in layout.slots),
            parameters=tuple(by_name[slot.name] for slot in layout.slots),
        )
        slots = tuple(replace(slot, copies=copies(by_name[slot.name])) for slot in layout.slots)
        layouts[index] = replace(layout, slots=slots)
    return found, layouts


def _trained_dtype(unit: Discovered, wanted: torch.dtype | None) -> torch.dtype:
    if not unit.dtype.is_floating_point:
        if unit.trainable:
            raise ModelError(
                f"{unit.names[0]} is {unit.dtype}, which no optimizer here trains: convert it to fp32, or freeze it"
            )
        return unit.dtype
    if wanted is not None:
        return wanted
    if unit.trainable and unit.dtype != torch.float32:
        raise ModelError(
            f'{unit.names[0]} is {str(unit.dtype).removeprefix("torch.")}, which is trained only with "bf16" or '
            '"fp16": {"enabled": true}. Set one, or give the model fp32 parameters.'
        )
    return unit.dtype
