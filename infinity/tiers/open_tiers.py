"""Opens the tiers of a plan: slabs of memory, and the files of the nvme tier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.errors import OutOfMemoryError
from infinity.plan.plan import Plan
from infinity.plan.pools import READ_AHEAD
from infinity.plan.shortage import shortage
from infinity.tier_kind import TierKind
from infinity.tiers.available import available_memory
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableFiles, DurableTier
from infinity.tiers.files import member_of, open_swap_files
from infinity.tiers.io import engine_of
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.slab import SlabTier
from infinity.tiers.slots import Slots


def open_tiers(plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None) -> dict[TierKind, Tier]:
    """Return kind → tier, for the tiers that hold extents or durable states.

    Raises OutOfMemoryError if the plan's extents and pools exceed memory, OutOfSpaceError or StorageError for its
    files. Disk space is reserved before memory is allocated.
    """
    missing = shortage(plan, {TierKind.HOST: available_memory(), TierKind.DEVICE: device.available_bytes()})
    if missing is not None:
        raise OutOfMemoryError(*missing)
    opened: dict[TierKind, Tier] = {}
    with ExitStack() as undo:
        if plan.io is not None:
            opened[TierKind.NVME] = _open_nvme(plan, device, rank, durable)
            undo.callback(opened[TierKind.NVME].close)
        for kind in sorted(kind for kind in plan.placement.nbytes if kind.in_memory):
            opened[kind] = SlabTier(kind, plan.placement.nbytes[kind], device, pinned=plan.pinned(kind))
            undo.callback(opened[kind].close)
        undo.pop_all()
    return opened


def _open_nvme(plan: Plan, device: Device, rank: int, durable: DurableFiles | None) -> Tier:
    assert plan.io is not None
    io = plan.io
    with ExitStack() as undo:
        if durable is None:
            file = open_swap_files(io.folders, io.nbytes, name=f"states of rank {rank}", chunk=io.chunk)
        else:
            file = open_swap_files(
                durable.folders,
                io.nbytes,
                name=states_of(rank),
                chunk=io.chunk,
                durable=True,
                holds_states=durable.committed is not None,
            )
        undo.callback(file.close)
        engine = engine_of(io)
        undo.callback(engine.close)
        settings = (file, io.reserved, engine, device, io.checksum_block, plan.buffers_of(READ_AHEAD))
        tier: Tier
        if durable is None or io.durable is None:
            tier = NvmeTier(*settings)
        else:
            slots = Slots(io.durable.extents, durable.committed)
            tier = DurableTier(slots, *settings, durable.checksums, io.durable.block)
        undo.pop_all()
    return tier


def states_of(rank: int) -> str:
    """Return the name of the file with a rank's durable states, in the first folder of a stripe."""
    return f"rank-{rank:05d}.states"


def states_in(folders: Sequence[Path], rank: int) -> list[Path]:
    """Return the file of a rank's durable states in each folder of a stripe."""
    return [folder / member_of(states_of(rank), member) for member, folder in enumerate(folders)]
