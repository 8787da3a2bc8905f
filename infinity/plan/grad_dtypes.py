"""Dtypes of gradients at each stage from `.grad` to the update. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GradDtypes(NamedTuple):
    """Dtypes for the gradients of parameters of one dtype."""

    collected: torch.dtype
    """Dtype in a whole unit's buffer, where gradients arrive."""
    reduced: torch.dtype
    """Dtype of the sum over ranks."""
    stored: torch.dtype
    """Dtype of a shard in its tier, and of the sum over micro-batches there."""


def grad_dtypes(
    own: torch.dtype,
    *,
    communication: torch.dtype | None,
    accumulation: torch.dtype,
    summed: bool,
    exchanged: bool,
    whole: bool,
) -> GradDtypes:
    """Return the dtypes of gradients of parameters of dtype `own`.

    communication, accumulation: dtypes of the sums over ranks (None: `own`) and over micro-batches. summed: gradients
    are summed over micro-batches. exchanged: gradients are reduced over ranks. whole: gradients are summed over
    micro-batches before they are reduced.

    Only the two sums round. Without a sum over micro-batches gradients are stored in the reduced dtype. Without ranks
    they are collected in their own dtype if the sum represents it exactly, and in the dtype of the sum otherwise, or if
    they are summed where they are collected.
    """
    reduced = communication or own
    if not summed:
        only = reduced if exchanged else own
        return GradDtypes(only, only, only)
    if not exchanged:
        leaving = own if accumulation == torch.float32 and not whole else accumulation
        return GradDtypes(leaving, leaving, accumulation)
    if whole:
        return GradDtypes(accumulation, reduced, reduced)
    return GradDtypes(reduced, reduced, accumulation)
