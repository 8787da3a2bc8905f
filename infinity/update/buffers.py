"""The memory that updates work in: tiers, extents and formats of states, and pools of buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity.plan.formats import GradDtypes, StateFormat
from infinity.plan.placement import Placement
from infinity.plan.policy import UpdatedIn, updated_in
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.pool import Pool


@dataclass
class UpdateBuffers:
    """Tiers, extents and formats of states, and the buffers of the pipeline."""

    device: Device
    placement: Placement
    tiers: Mapping[TierKind, Tier]
    """Tiers of parameters and optimizer states, by name."""
    grad_tiers: Mapping[TierKind, Tier]
    """Tiers of stored gradients, by name."""
    formats: Callable[[torch.dtype], StateFormat]
    """Dtype of parameters → format of their optimizer states."""
    grads: Callable[[torch.dtype], GradDtypes]
    reads_ahead: int
    """Number of tiles read ahead of compute."""
    tile_pool: Pool
    grad_tile_pool: Pool
    param_pool: Pool | None
    """Host buffers for shards of parameters that are updated in "staging" (`updated_in`); None if there are none."""
    beside_compute: bool
    """True if updates overlap with the model's operations on the same processors."""

    def updated_in(self, unit: int) -> UpdatedIn:
        """Return the memory in which a unit's parameters are updated."""
        return updated_in(self.placement, unit, host_addressable=self.device.host_addressable)
