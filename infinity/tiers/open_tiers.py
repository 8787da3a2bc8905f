"""Opens the tiers of a plan: slabs of memory, and the files of the nvme tier.

All buffer pools of an engine, made from their specs and registered with its tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from infinity.plan.plan import Plan
from infinity.plan.pools import READ_AHEAD, PoolSpec
from infinity.tier_kind import TierKind
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.durable import DurableFiles, DurableTier
from infinity.tiers.files import member_of, open_swap_files
from infinity.tiers.io import engine_of
from infinity.tiers.nvme import NvmeTier
from infinity.tiers.pool import Pool
from infinity.tiers.slab import SlabTier
from infinity.tiers.slots import Slots


def open_tiers(plan: Plan, device: Device, rank: int, durable: DurableFiles | None = None) -> dict[TierKind, Tier]:
    """Return kind → tier, for the tiers that hold extents or durable states.

    Raises OutOfSpaceError or StorageError for the plan's files. Disk space is reserved before memory is allocated.
    """
    opened: dict[TierKind, Tier] = {}
    with ExitStack() as undo:
        if plan.io is not None:
            opened[TierKind.NVME] = _open_nvme(plan, device, rank, durable)
            undo.callback(opened[TierKind.NVME].close)
        for kind in sorted(kind for kind in plan.placement.nbytes if kind.in_memory):
            spares = plan.placement.spares_in(kind)
            opened[kind] = SlabTier(kind, plan.placement.nbytes[kind], device, pinned=plan.pinned(kind), spares=spares)
            undo.callback(opened[kind].close)
        undo.pop_all()
    return opened


def _open_nvme(plan: Plan, device: Device, rank: int, durable: DurableFiles | None) -> Tier:
    assert plan.io is not None
    io = plan.io
    folders = io.folders if durable is None else durable.folders
    with ExitStack() as undo:
        file = open_swap_files(
            folders,
            io.nbytes,
            name=f"states of rank {rank}" if durable is None else states_of(rank),
            chunk=io.stripe.chunk,
            weights=io.stripe.weights,
            durable=durable is not None,
            holds_states=durable is not None and durable.committed is not None,
        )
        undo.callback(file.close)
        engine = engine_of(io)
        undo.callback(engine.close)
        settings = (file, io.reserved, engine, device, io.checksum_block, plan.buffers_of(READ_AHEAD))
        tier: Tier
        if durable is None or io.durable is None:
            tier = NvmeTier(*settings, plan.placement.spares_in(TierKind.NVME))
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


class Pools:
    """Pools by name. debug: poison released buffers, and reuse the one that has been free longest."""

    def __init__(self, specs: Iterable[PoolSpec], device: Device, tiers: Iterable[Tier], *, debug: bool) -> None:
        self._tier_of: dict[str, str] = {}
        self._pools: dict[str, Pool] = {}
        registered = list(tiers)
        for spec in specs:
            allocate = device.empty if spec.tier.on_device else device.host_buffer
            make = partial(_registered, allocate, device, registered)
            poison = device.poison if debug else None
            self._pools[spec.name] = Pool(make, spec.sizes, name=spec.name, poison=poison, fifo=debug)
            self._tier_of[spec.name] = spec.tier

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def get(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def of_tier(self, tier: str) -> list[Pool]:
        """Return the pools whose buffers are in `tier`."""
        return [pool for name, pool in self._pools.items() if self._tier_of[name] == tier]

    def nbytes(self, tier: str) -> int:
        """Return the bytes of all buffers in `tier`."""
        return sum(pool.nbytes for pool in self.of_tier(tier))


def _registered(
    allocate: Callable[[int], torch.Tensor], device: Device, tiers: Sequence[Tier], nbytes: int
) -> torch.Tensor:
    """Return a buffer that is registered with `tiers`. Refers to no model, which a pool must not keep alive."""
    memory = allocate(nbytes)
    # Every tier, since a buffer of the pool may be read from any of them.
    if device.is_host(memory):
        for tier in tiers:
            tier.register(memory)
    return memory
