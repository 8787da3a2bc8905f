"""Plan of saved activations: the tier that they go to, and its files. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity.plan.io import IoPlan, io_in
from infinity.plan.policy import DeviceInfo
from infinity.plan.pools import ACTIVATIONS, STAGED_READS, STAGED_WRITES, STAGING_BYTES, PoolSpec
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class ActivationPlan:
    """Tier of the tensors that autograd saves outside of units. Their bytes are unknown before a forward."""

    tier: TierKind
    """Host or nvme."""
    min_bytes: int
    memory_bytes: int | None
    """Limit on the bytes that stay on the device; None: derived from the largest tensor."""
    io: IoPlan | None
    """Files of tier nvme, which grow as needed; None: tier host."""

    def pools(self) -> Iterator[PoolSpec]:
        """Yield the buffers between the device and nvme."""
        if self.io is not None:
            yield PoolSpec(ACTIVATIONS, TierKind.HOST, {STAGING_BYTES: STAGED_READS + STAGED_WRITES})


def plan_activations(config: Config, device: DeviceInfo) -> ActivationPlan | None:
    """Return the plan of `infinity.activations`; None if saved tensors stay where they are computed."""
    asked = config.infinity.activations
    tier = TierKind.of_config(asked.device)
    if tier.on_device or (tier.in_memory and device.host_addressable):
        return None
    io = None
    if not tier.in_memory:
        io = io_in(config, asked.nvme_path or config.zero_optimization.nvme_paths, 0)
    return ActivationPlan(tier, asked.min_bytes, None if asked.memory_bytes == "auto" else asked.memory_bytes, io)
