"""Encodes the shard of a frozen unit whose tier stores a code, and refuses what the code cannot hold."""

from __future__ import annotations

import torch

from infinity.errors import ModelError, UsageError
from infinity.plan.frozen import FrozenCode
from infinity.plan.layout import UnitLayout
from infinity.tiers import frozen
from infinity.tiers.memory import host_tensor


def encode(
    layout: UnitLayout, code: FrozenCode, values: torch.Tensor, rank: int, *, edits: bool = False
) -> torch.Tensor:
    """Return the bytes of the unit's extent, aligned, uint8 (stored_nbytes,). values: the shard of `rank`, (shard_numel,)
    in the unit's dtype.

    Raises ModelError for a value that is not finite. edits: raises UsageError for that, and for one that would be
    rounded.
    """
    first, _ = layout.shard_range(rank)
    stored, bad = frozen.encode(code, values)
    if bad < values.numel():
        raise (UsageError if edits else ModelError)(
            f"{_name(layout, first + bad)} is frozen and has the value {values[bad].item()}, which infinity.frozen "
            f'"{code.format}" cannot store: give it finite values, or set infinity.frozen to "as_is"'
        )
    if edits:
        decoded = host_tensor(values.nbytes)
        frozen.decode(code, stored, decoded)
        changed = (decoded.view(values.dtype) != values).nonzero()
        if len(changed):
            at = int(changed[0])
            raise UsageError(
                f"{_name(layout, first + at)} is frozen and was edited to {values[at].item()}, which infinity.frozen "
                f'"{code.format}" would round to {decoded.view(values.dtype)[at].item()}. Edit it to values of '
                "infinity.optim.frozen_values, make it trainable, or edit it before the engine is made."
            )
    return stored


def _name(layout: UnitLayout, element: int) -> str:
    """Return the name of the parameter at an element of the unit's flat tensor."""
    return layout.slots[layout.slot_at(element)].name
