"""Files and I/O settings of the nvme tier: stripes, slots of durable states, files of saved activations. Pure.

Striping cuts a logical file over several files, so that drives work in parallel. Chunks go to the files in turn. With n
files, byte o of the whole is in file (o // chunk) % n, at byte (o // chunk // n) * chunk + o % chunk of it.
`infinity.tiers.files` creates the files, and the native engine implements the mapping.

A durable run has two slots on nvme for every parameter and optimizer state, whatever its tier. An update writes the
slot that is not committed, so that the last committed step stays whole until the next one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.plan.placement import EXTENT_ALIGNMENT, Extent, Placement, State, aligned, checksum_block
from infinity.plan.policy import DeviceInfo
from infinity.plan.pools import ACTIVATIONS, STAGED_READS, STAGED_WRITES, STAGING_BYTES, PoolSpec
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config


SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 1 << 20


def stripe_chunk(block_size: int) -> int:
    """Return the bytes of a chunk for requests cut into pieces of `block_size` bytes: a multiple of 64 KiB up to 1 MiB.

    A chunk is as large as a piece, so that striping cuts no piece. It is at most 1 MiB, at which a drive has its full
    rate; with larger chunks the 10 MB of an update's tile would not divide evenly. It is a multiple of 64 KiB, so that
    each page of any machine and each checksum block lies in one file.
    """
    return min(-(-block_size // SMALLEST_CHUNK) * SMALLEST_CHUNK, LARGEST_CHUNK)


def shares(nbytes: int, chunk: int, paths: int) -> list[int]:
    """Return the bytes of each of `paths` files that together hold `nbytes`, in whole chunks.

    Each has at least one chunk, since an empty file cannot be probed.
    """
    chunks = -(-nbytes // chunk)
    return [max(1, -(-(chunks - member) // paths)) * chunk for member in range(paths)]


def ranges(offset: int, nbytes: int, chunk: int, paths: int) -> list[tuple[int, int]]:
    """Return the bytes [start, stop) of each of `paths` files that are bytes [offset, offset + nbytes) together."""

    def before(end: int, member: int) -> int:
        """Return the bytes that a file holds of the first `end` bytes."""
        rows, rest = divmod(end, chunk * paths)
        return rows * chunk + min(max(rest - member * chunk, 0), chunk)

    return [(before(offset, member), before(offset + nbytes, member)) for member in range(paths)]


def pieces(offset: int, nbytes: int, chunk: int, paths: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, byte in it, bytes) for bytes [offset, offset + nbytes) in order, cut at chunks."""
    stop = offset + nbytes
    while offset < stop:
        row, inside = divmod(offset, chunk)
        length = min(stop - offset, chunk - inside if paths > 1 else nbytes)
        yield row % paths, row // paths * chunk + inside, length
        offset += length


@dataclass(frozen=True)
class Durable:
    """One durable extent. first, second: its slots on nvme. working: the extent that training reads and writes, which
    is `first` if the state lies on nvme.
    """

    unit: int
    state: State
    working: Extent
    first: Extent
    second: Extent


@dataclass(frozen=True)
class DurablePlan:
    """A run whose states survive the process: its name, its extents, and the bytes that their slots add on nvme.

    block: bytes of a block that is always written whole, whose checksum is part of an extent's digest.
    """

    run: str
    extents: tuple[Durable, ...]
    nbytes: int
    block: int = 4096

    def added(self) -> Iterator[tuple[State, int]]:
        """Yield the state and the bytes of each slot that no extent of the placement is."""
        for each in self.extents:
            slots = (each.second,) if each.first is each.working else (each.first, each.second)
            yield from ((each.state, aligned(slot.nbytes)) for slot in slots)

    @property
    def slot_nbytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(aligned(each.first.nbytes) + aligned(each.second.nbytes) for each in self.extents)


def plan_durable(run: str, placement: Placement, used: int) -> DurablePlan:
    """Place the slots after the first `used` bytes of the tier nvme. Gradients have none: no commit holds any."""
    found: list[Durable] = []
    end = -(-used // aligned(1)) * aligned(1)

    def next_slot(extent: Extent) -> Extent:
        nonlocal end
        place = replace(extent, tier=TierKind.NVME, offset=end)
        end += aligned(extent.nbytes)
        return place

    for (unit, state), extent in placement.extents.items():
        if state is State.GRAD:
            continue
        first = next_slot(extent) if extent.tier.in_memory else extent
        found.append(Durable(unit, state, extent, first, next_slot(extent)))
    return DurablePlan(run, tuple(found), end - used)


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
