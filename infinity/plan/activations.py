"""Plan of saved activations: the tier that they go to, and its files. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity.plan.io import IoPlan, io_in
from infinity.plan.policy import DeviceInfo
from infinity.plan.pools import ACTIVATIONS, STAGED_READS, STAGED_WRITES, STAGING_BYTES, PoolSpec

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class ActivationPlan:
    """Tier of the tensors that autograd saves outside of units. Their bytes are unknown before a forward."""

    tier: str
    """ "host" or "nvme"."""
    min_bytes: int
    memory_bytes: int | None
    """Limit on the bytes that stay on the device; None: derived from the largest tensor."""
    io: IoPlan | None
    """Files of tier nvme, which grow as needed; None: tier host."""

    def pools(self) -> Iterator[PoolSpec]:
        """Yield the buffers between the device and nvme."""
        if self.io is not None:
            yield PoolSpec(ACTIVATIONS, "host", {STAGING_BYTES: STAGED_READS + STAGED_WRITES})


def plan_activations(config: Config, device: DeviceInfo) -> ActivationPlan | None:
    """Return the plan of `infinity.activations`; None if saved tensors stay where they are computed."""
    asked = config.infinity.activations
    tier = {"none": "device", "cpu": "host", "nvme": "nvme"}[asked.device]
    if tier == "device" or (tier == "host" and device.host_addressable):
        return None
    io = None
    if tier == "nvme":
        io = io_in(config, asked.nvme_path or config.zero_optimization.nvme_paths, 0)
    return ActivationPlan(tier, asked.min_bytes, None if asked.memory_bytes == "auto" else asked.memory_bytes, io)
