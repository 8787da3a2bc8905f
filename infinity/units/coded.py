"""Encodes the shard of a frozen unit whose tier stores a code, and refuses values that the code cannot hold."""

from __future__ import annotations

import torch

from infinity.errors import ModelError, UsageError
from infinity.plan.frozen import FrozenCode
from infinity.plan.layout import UnitLayout
from infinity.tiers import frozen
from infinity.tiers.device import Device
from infinity.tiers.memory import host_tensor


def encode_edit(layout: UnitLayout, code: FrozenCode, memory: torch.Tensor, rank: int, device: Device) -> torch.Tensor:
    """Return the bytes of the unit's extent, as `encode`. memory: the part of `rank` in the unit's buffer, uint8, which
    was edited; from element `rank * shard_numel` on.

    Raises UsageError for a value that the code would round.
    """
    values = host_tensor(memory.numel())
    device.copy(values, memory).wait()
    return encode(layout, code, values.view(layout.dtype), rank, edited=True)


def encode(
    layout: UnitLayout, code: FrozenCode, values: torch.Tensor, rank: int, *, edited: bool = False
) -> torch.Tensor:
    """Return the bytes of the unit's extent, aligned, uint8.

    values: of the shard of `rank`, in the unit's dtype, on the host. edited: they replace values in use.

    Raises ModelError for a value that is not finite; UsageError if it was edited, or was edited and would be rounded.
    """
    first, _ = layout.shard_range(rank)
    stored, bad = frozen.encode(code, values)
    if bad < values.numel():
        raise (UsageError if edited else ModelError)(
            f"{_name(layout, first + bad)} is frozen and has the value {values[bad].item()}, which infinity.frozen "
            f'"{code.format}" cannot store: give it finite values, or set infinity.frozen to "as_is"'
        )
    if edited:
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
