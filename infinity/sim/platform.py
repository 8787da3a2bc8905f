"""The platform of a simulated engine: ranks, tiers and kernels in virtual time, and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.activations.store import ActivationStore
from infinity.comm.communicator import Communicator
from infinity.comm.groups import Group
from infinity.construction.stream_in import move_buffers
from infinity.durable.run import DurableRun
from infinity.plan.activations import ActivationPlan
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.sim.activations import SimulatedRoom, open_simulated_room
from infinity.sim.clock import Clock
from infinity.sim.compute import Compute
from infinity.sim.device import SimulatedDevice
from infinity.sim.kernels import simulated_kernels
from infinity.sim.lanes import Drive
from infinity.sim.links import Links
from infinity.sim.ranks import Ranks, SimulatedCommunicator
from infinity.sim.tiers import open_simulated
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableFiles
from infinity.units.binding import unbind
from infinity.units.discover import UnitParameters
from infinity.units.states import UnitStates
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.config import Config


class SimulatedPlatform:
    """A `Platform` (`infinity.engine.platform`) on one clock."""

    def __init__(self, clock: Clock, device: SimulatedDevice, compute: Compute, links: Links, ranks: Ranks) -> None:
        """compute: of the model's thread."""
        self.kernels = simulated_kernels(device)
        self._clock = clock
        self._device = device
        self._compute = compute
        self._ranks = ranks
        self._collective = links.collective
        self.room: SimulatedRoom | None = None
        """That of saved activations, if they leave the device."""
        self._drive: Drive | None = None
        if links.nvme_read is not None and links.nvme_write is not None:
            mixed = links.nvme_mixed or (links.nvme_read + links.nvme_write) / 2
            self._drive = Drive(clock, *(rate / ranks.per_node for rate in (links.nvme_read, links.nvme_write, mixed)))

    def communicator(self, device: Device, *, sharded: bool, group: Group | None, rank_timeout: float) -> Communicator:
        return SimulatedCommunicator(self._clock, self._device, self._ranks, self._collective, sharded=sharded)

    def prepare(self, model: nn.Module) -> None:
        """Values are not needed."""

    def open_run(self, plan: Plan, config: Config, ranks: Communicator) -> DurableRun | None:
        return None  # a commit moves no bytes but those of states in memory

    def open_tiers(
        self, plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None
    ) -> dict[TierKind, Tier]:
        return open_simulated(plan, device, self._clock, self._drive)

    def open_activations(self, plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
        if plan is None:
            return None
        self.room = open_simulated_room(plan, device, self._clock, self._drive, self._compute.count)
        return ActivationStore(self.room, device, plan)

    def stream_in(
        self,
        model: nn.Module,
        found: Sequence[UnitParameters],
        layouts: Sequence[UnitLayout],
        states: UnitStates,
        ranks: Communicator,
        device: torch.device,
    ) -> list[Unit]:
        move_buffers(model, device)
        units = []
        for members, layout in zip(found, layouts, strict=True):
            units.append(Unit(layout, list(members.parameters), device))
            unbind(units[-1])
        return units
