"""Frees the device's memory between phases of a program, such as generation by another engine, and restores it."""

from __future__ import annotations

import torch

from infinity.engine.parts import EngineParts
from infinity.errors import LifetimeError
from infinity.tiers.memory import return_freed_memory
from infinity.tiers.slab import SlabTier


def offload(parts: EngineParts) -> None:
    """Move the states on the device to host memory, and free the device's buffer pools. All units must be released.

    Buffers that the script's own views refer to stay, as always.
    """
    pools = parts.pools.of_tier("device")
    leased = sum(pool.leased for pool in pools)
    if leased:
        raise LifetimeError(f"internal error: {leased} buffers of the device are leased after all units were released")
    if parts.training is not None:
        parts.training.pipeline.forget_buffers()
        if parts.training.passing is not None:
            parts.training.passing.clear()
    for tier in _slabs(parts):
        tier.offload()
    for pool in pools:
        pool.dismiss()
    return_freed_memory()
    if parts.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()


def reload(parts: EngineParts) -> None:
    """Move the states back to the device, and allocate its buffer pools again."""
    if parts.training is not None:
        parts.training.pipeline.forget_buffers()
    for tier in _slabs(parts):
        tier.reload()
    for pool in parts.pools.of_tier("device"):
        pool.recall()


def _slabs(parts: EngineParts) -> list[SlabTier]:
    return [tier for tier in parts.tiers.values() if isinstance(tier, SlabTier)]
