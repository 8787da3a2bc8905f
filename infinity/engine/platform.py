"""The platform of an engine: its ranks, tiers, kernels and values. A simulation has one of its own (`infinity.sim`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.activations.disk import open_activations
from infinity.activations.store import ActivationStore
from infinity.comm.communicator import Communicator
from infinity.comm.groups import Group
from infinity.construction.materialize import check_values, make_buffers
from infinity.construction.stream_in import move_buffers, share_buffers, stream_in
from infinity.durable.run import DurableRun, open_run, recorded_stripe
from infinity.engine.budget import free_on_each
from infinity.plan.io import ActivationPlan
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.tier_kind import TierKind
from infinity.tiers.available import available_memory
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableFiles
from infinity.tiers.io import striped_by_speed
from infinity.tiers.open_tiers import open_tiers
from infinity.units.discover import UnitParameters
from infinity.units.states import UnitStates
from infinity.units.unit import Unit
from infinity.update.kernels import NATIVE, Kernels

if TYPE_CHECKING:
    from infinity.config import Config


class Platform:
    """Makes the parts of an engine that exchange, store or compute bytes, on this machine."""

    kernels: Kernels = NATIVE

    def communicator(self, device: Device, *, sharded: bool, group: Group | None, rank_timeout: float) -> Communicator:
        return Communicator(device, sharded=sharded, group=group, rank_timeout=rank_timeout)

    def prepare(self, model: nn.Module) -> None:
        """Make the buffers of a model on the meta device, and check that all values exist or can be made."""
        make_buffers(model)
        check_values(model)

    def striped(self, plan: Plan, config: Config, ranks: Communicator) -> Plan:
        """Return a plan with the shares of folders: those that a durable run has recorded, else by measured speed."""
        if config.aio.shares != "auto":
            return plan
        io, saved, writes = plan.io, plan.activations, plan.update is not None
        if io is not None:
            io = recorded_stripe(io, ranks) or striped_by_speed(io, ranks.local_size, writes=writes)
        if saved is not None and (own := saved.io) is not None:
            if io is not None and io.folders == own.folders:
                saved = replace(saved, io=replace(own, stripe=io.stripe))
            else:
                saved = replace(saved, io=striped_by_speed(own, ranks.local_size))
        return replace(plan, io=io, activations=saved)

    def available(self, device: Device) -> dict[TierKind, int] | None:
        """Return the bytes of memory that a plan may take; None: as many as it needs."""
        return {TierKind.HOST: available_memory(), TierKind.DEVICE: device.available_bytes()}

    def free_on_each(self, folders: list[str]) -> int:
        """Return the bytes for states that fit into folders on nvme if each takes as many."""
        return free_on_each(folders)

    def open_run(self, plan: Plan, config: Config, ranks: Communicator) -> DurableRun | None:
        """Open the folder of durable states; None if the plan has none."""
        if plan.io is None or plan.io.durable is None:
            return None
        return open_run(plan, config, ranks)

    def open_tiers(
        self, plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None
    ) -> dict[TierKind, Tier]:
        return open_tiers(plan, device, rank, durable)

    def open_activations(self, plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
        return open_activations(plan, device, rank)

    def stream_in(
        self,
        model: nn.Module,
        found: Sequence[UnitParameters],
        layouts: Sequence[UnitLayout],
        states: UnitStates,
        ranks: Communicator,
        device: torch.device,
    ) -> list[Unit]:
        """Move the values of `model` to their tiers, and its buffers to `device`. Returns the units, released."""
        units = stream_in(model, found, layouts, states, ranks, device)
        share_buffers(model, ranks)
        move_buffers(model, device)
        return units


MACHINE = Platform()
