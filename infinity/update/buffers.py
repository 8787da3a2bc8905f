"""The memory that updates work in: tiers, extents and formats of states, and pools of buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.plan.formats import StateFormat
from infinity.plan.grad_dtypes import GradDtypes
from infinity.plan.placement import Extent
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier


@dataclass
class UpdateBuffers:
    """Tiers, extents and formats of states, and the buffers of the pipeline."""

    device: Device
    param_tier: Tier
    optim_tier: Tier
    grad_tier: Tier | None
    param_extent: Callable[[int], Extent]
    optim_extent: Callable[[int], Extent]
    grad_extent: Callable[[int], Extent]
    formats: Callable[[torch.dtype], StateFormat]
    tile_size: int
    reads_ahead: int
    """Number of tiles read ahead of compute."""
    tile_pool: Pool
    grad_tile_pool: Pool
    param_pool: Pool | None
    """Host buffers for parameter shards; None if the update works in the device buffers or in `param_slab`."""
    param_slab: SlabTier | None
    """The tier in whose extents the host updates parameters; None: it works in buffers."""
    grads: Callable[[torch.dtype], GradDtypes]

    @property
    def in_target(self) -> bool:
        """Return whether the update works in the unit's buffer itself."""
        return self.param_pool is None and self.param_slab is None
