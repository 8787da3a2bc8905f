"""Files and I/O settings of the nvme tier. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.plan.durable import DurablePlan, plan_durable
from infinity.plan.placement import EXTENT_ALIGNMENT, Placement, checksum_block
from infinity.plan.stripe import shares, stripe_chunk
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


@dataclass(frozen=True)
class IoPlan:
    """Folders, requests and checksums of the nvme tier."""

    folders: tuple[Path, ...]
    """States are striped over them in turn."""
    nbytes: int
    """Bytes of all extents and slots."""
    passing: int
    """Bytes of them that gradients take only while they are stored (`Placement.passing`)."""
    chunk: int
    """Bytes of a stripe's chunk."""
    engine: str
    block_size: int
    queue_depth: int
    threads: int
    """I/O threads over all folders."""
    checksum_block: int
    """Bytes of a block whose checksum is kept; 0: no checksums."""
    durable: DurablePlan | None = None
    """Slots of states that survive the process; None: nothing does."""

    @property
    def reserved(self) -> int:
        """Bytes reserved on disk for the engine's whole life, in whole chunks of a stripe."""
        if len(self.folders) == 1:
            return self.nbytes - self.passing
        return sum(shares(self.nbytes, self.chunk, len(self.folders))) - self.passing


def plan_io(config: Config, placement: Placement, *, train: bool) -> IoPlan | None:
    """Return the plan of the nvme tier; None if no extent lies there and no state is durable. train: states change."""
    passing = placement.passing.get(TierKind.NVME, 0)
    nbytes = placement.nbytes.get(TierKind.NVME, 0) + passing
    if train and config.infinity.durable and placement.extents:
        durable = plan_durable(config.infinity.run, placement, nbytes)
        paths = config.zero_optimization.durable_paths
        io = io_in(config, paths, nbytes + durable.nbytes, passing, placement.granule)
        block = checksum_block(placement.granule, io.block_size, io.chunk)
        return replace(io, durable=replace(durable, block=block))
    if not nbytes:
        return None
    return io_in(config, config.zero_optimization.nvme_paths, nbytes, passing, placement.granule)


def io_in(
    config: Config, folders: tuple[Path, ...], nbytes: int, passing: int = 0, granule: int = EXTENT_ALIGNMENT
) -> IoPlan:
    """Return the plan of files in `folders`. granule: as in `checksum_block`."""
    aio = config.aio
    chunk = stripe_chunk(aio.block_size)
    return IoPlan(
        folders=folders,
        nbytes=nbytes,
        passing=passing,
        chunk=chunk,
        engine=aio.engine,
        block_size=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.threads * len(folders),
        checksum_block=checksum_block(granule, aio.block_size, chunk) if aio.checksum else 0,
    )
