"""Opens the room of saved activations that a plan names."""

from __future__ import annotations

from infinity.activations.disk import DiskRoom
from infinity.activations.host import HostRoom
from infinity.activations.room import Room
from infinity.activations.store import ActivationStore
from infinity.plan.activations import ActivationPlan
from infinity.tiers.device import Device
from infinity.tiers.io import engine_of


def open_activations(plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
    """Return the store of saved activations; None without a plan. Raises StorageError for a folder."""
    if plan is None:
        return None
    room: Room = HostRoom(device) if plan.io is None else DiskRoom(plan.io, engine_of(plan.io), device, rank)
    return ActivationStore(room, device, plan)
