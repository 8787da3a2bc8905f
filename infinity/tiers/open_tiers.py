"""Opens the tiers of a plan: slabs of memory, and the files of the nvme tier."""

from __future__ import annotations

from contextlib import ExitStack

from infinity.errors import OutOfMemoryError
from infinity.plan.plan import Plan, shortage
from infinity.plan.pools import READ_AHEAD
from infinity.tiers.available import available_memory
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.files import open_swap_files
from infinity.tiers.io import engine_of
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.slab import SlabTier


def open_tiers(plan: Plan, device: Device, rank: int) -> dict[str, Tier]:
    """Return tier name → tier, for the tiers that hold extents.

    Raises OutOfMemoryError if the plan's extents and pools exceed memory, OutOfSpaceError or StorageError for its
    files. Disk space is reserved before memory is allocated.
    """
    missing = shortage(plan, {"host": available_memory(), "device": device.available_bytes()})
    if missing is not None:
        raise OutOfMemoryError(*missing)
    opened: dict[str, Tier] = {}
    with ExitStack() as undo:
        for name in sorted(plan.placement.nbytes, key=lambda name: name != "nvme"):
            opened[name] = _open_nvme(plan, device, rank) if name == "nvme" else _open_slab(name, plan, device)
            undo.callback(opened[name].close)
        undo.pop_all()
    return opened


def _open_slab(name: str, plan: Plan, device: Device) -> Tier:
    return SlabTier(name, plan.placement.nbytes[name], device, on_device=name == "device", pinned=plan.pinned(name))


def _open_nvme(plan: Plan, device: Device, rank: int) -> Tier:
    assert plan.io is not None
    io = plan.io
    with ExitStack() as undo:
        file = open_swap_files(io.folders, io.nbytes, name=f"states of rank {rank}", chunk=io.chunk)
        undo.callback(file.close)
        engine = engine_of(io)
        undo.callback(engine.close)
        tier = NvmeTier(file, io.reserved, engine, device, io.checksum_block, plan.buffers_of(READ_AHEAD))
        undo.pop_all()
    return tier
