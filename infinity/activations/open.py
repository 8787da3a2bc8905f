"""Opens the room of saved activations that a plan names."""

from __future__ import annotations

import warnings

from infinity.activations.disk import NAME, DiskRoom
from infinity.activations.room import HostRoom, Room
from infinity.activations.store import ActivationStore
from infinity.plan.io import ActivationPlan
from infinity.tiers.device import Device
from infinity.tiers.files import check_folder, open_swap_files
from infinity.tiers.io import engine_of


def open_activations(plan: ActivationPlan | None, device: Device, rank: int) -> ActivationStore | None:
    """Return the store of saved activations; None without a plan. Raises StorageError for a folder that takes no
    file.
    """
    if plan is None:
        return None
    if plan.io is not None:
        for folder in plan.io.folders:
            check_folder(folder, "infinity.activations.nvme_path")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first real file repeats them
            open_swap_files(plan.io.folders, 1, name=NAME).close()
    room: Room = HostRoom(device) if plan.io is None else DiskRoom(plan.io, engine_of(plan.io), device, rank)
    return ActivationStore(room, device, plan)
