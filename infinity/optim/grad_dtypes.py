"""What gradients are kept in on their way from `.grad` to the update."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GradDtypes(NamedTuple):
    """Of the gradients of parameters of one dtype."""

    collected: torch.dtype
    """In a whole unit's buffer, where they arrive."""
    reduced: torch.dtype
    """When they are summed over ranks."""
    stored: torch.dtype
    """A shard, in its tier and when it is added to what is there."""


def grad_dtypes(
    own: torch.dtype,
    *,
    communication: torch.dtype | None,
    accumulation: torch.dtype,
    micro_batches: int,
    exchanged: bool,
    whole: bool,
) -> GradDtypes:
    """The dtypes of gradients of parameters of dtype `own`.

    communication, accumulation: what they are summed in over ranks (None: their own) and over micro-batches.
    micro_batches: of one step. exchanged: there are ranks. whole: they are summed over micro-batches before they are
    reduced.

    Nothing is rounded but by one of the two sums: what is not summed over micro-batches is stored as it was reduced,
    and what is not reduced is collected as it is summed.
    """
    reduced = communication or own
    if micro_batches == 1:
        only = reduced if exchanged else own
        return GradDtypes(only, only, only)
    if not exchanged:
        return GradDtypes(accumulation, accumulation, accumulation)
    if whole:
        return GradDtypes(accumulation, reduced, reduced)
    return GradDtypes(reduced, reduced, accumulation)
