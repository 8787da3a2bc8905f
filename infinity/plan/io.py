"""Files and I/O settings of the nvme tier: stripes, slots of durable states, files of saved activations. Pure.

Striping cuts a logical file over several files, so that drives work in parallel (`Stripe`). `infinity.tiers.files`
creates the files, and the native engine implements the mapping.

A durable run has two slots on nvme for every parameter and optimizer state, whatever its tier. An update writes the
slot that is not committed, so that the last committed step stays whole until the next one is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True)
class Stripe:
    """Places of the bytes of a logical file in several files. Chunk c of the whole is the next one of file `order[c %
    len(order)]`.
    """

    chunk: int
    """Bytes of a chunk."""
    weights: tuple[int, ...]
    """Chunks of each file in a stripe."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """File of each chunk of a stripe. The chunks of a file are spread evenly, so that short ranges use all files;
        equal weights are round robin.
        """
        files = range(len(self.weights))
        return tuple(
            f for _, f in sorted(((2 * k + 1) / self.weights[f], f) for f in files for k in range(self.weights[f]))
        )

    def sizes(self, nbytes: int) -> list[int]:
        """Return the bytes of each file, which together hold `nbytes`, in whole chunks.

        Each has at least one chunk, since an empty file cannot be probed.
        """
        end = -(-nbytes // self.chunk) * self.chunk
        return [max(self._before(end, file), self.chunk) for file in range(len(self.weights))]

    def ranges(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the bytes [start, stop) of each file that are bytes [offset, offset + nbytes) together."""
        files = range(len(self.weights))
        return [(self._before(offset, file), self._before(offset + nbytes, file)) for file in files]

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, byte in it, bytes) for bytes [offset, offset + nbytes) in order, cut at chunks."""
        stop = offset + nbytes
        while offset < stop:
            file = self.order[offset // self.chunk % len(self.order)]
            length = min(stop - offset, self.chunk - offset % self.chunk if len(self.weights) > 1 else nbytes)
            yield file, self._before(offset, file), length
            offset += length

    def _before(self, end: int, file: int) -> int:
        """Return the bytes that a file holds of the first `end` bytes."""
        chunk, inside = divmod(end, self.chunk)
        stripes, rest = divmod(chunk, len(self.order))
        whole = stripes * self.weights[file] + self.order[:rest].count(file)
        return whole * self.chunk + (inside if self.order[rest] == file else 0)


LONGEST_STRIPE = 32
"""Chunks of a stripe whose weights are chosen by speed: each update's tile should use all files."""
_ALIKE = 0.8
"""Speeds that differ by less are alike, since a short measurement varies by as much."""
_NEAR = 0.9
"""Part of the best bandwidth that a shorter stripe may have."""


def are_alike(speeds: Sequence[float]) -> bool:
    return min(speeds) >= _ALIKE * max(speeds)


def weights_of(speeds: Sequence[float], limits: Sequence[float]) -> tuple[int, ...]:
    """Return weights of a stripe for files of these speeds. limits: largest part of all bytes that each file can hold.

    Speeds that are alike give equal weights. A file gets none only if it has no room, or if a single chunk in it would
    take longer than `LONGEST_STRIPE` chunks in the others. If the limits allow no weights, they are equal.
    """
    equal = (1,) * len(speeds)
    if are_alike(speeds) and len(speeds) * min(limits) >= 1:
        return equal
    found: dict[tuple[int, ...], float] = {}
    for total in range(1, max(LONGEST_STRIPE, 2 * len(speeds)) + 1):
        weights = [0] * len(speeds)
        for _ in range(total):
            # To the file that is done with it first: for equal chunks, this minimizes the time of a stripe.
            fitting = [f for f, weight in enumerate(weights) if weight + 1 <= total * limits[f]]
            if not fitting:
                break
            weights[min(fitting, key=lambda f: (weights[f] + 1) / speeds[f])] += 1
        else:
            found[tuple(weights)] = total / max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    near = [weights for weights, speed in found.items() if speed >= _NEAR * max(found.values())]
    return min(near, key=lambda weights: (weights.count(0), sum(weights)), default=equal)


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
    """States are striped over them."""
    nbytes: int
    """Bytes of all extents and slots."""
    passing: int
    """Bytes of them that gradients take only while they are stored (`Placement.passing`)."""
    stripe: Stripe
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
        return sum(self.stripe.sizes(self.nbytes)) - self.passing


def plan_io(config: Config, placement: Placement, *, train: bool) -> IoPlan | None:
    """Return the plan of the nvme tier; None if no extent lies there and no state is durable. train: states change."""
    passing = placement.passing.get(TierKind.NVME, 0)
    nbytes = placement.nbytes.get(TierKind.NVME, 0) + passing
    if train and config.infinity.durable and placement.extents:
        durable = plan_durable(config.infinity.run, placement, nbytes)
        paths = config.zero_optimization.durable_paths
        io = io_in(config, paths, nbytes + durable.nbytes, passing, placement.granule)
        block = checksum_block(placement.granule, io.block_size, io.stripe.chunk)
        return replace(io, durable=replace(durable, block=block))
    if not nbytes:
        return None
    return io_in(config, config.zero_optimization.nvme_paths, nbytes, passing, placement.granule)


def io_in(
    config: Config, folders: tuple[Path, ...], nbytes: int, passing: int = 0, granule: int = EXTENT_ALIGNMENT
) -> IoPlan:
    """Return the plan of files in `folders`. granule: as in `checksum_block`."""
    aio, weights = config.aio, (1,) * len(folders)
    chunk = stripe_chunk(aio.block_size)
    # Saved activations may have folders of their own, of another number.
    if not isinstance(aio.shares, str) and len(aio.shares) == len(folders):
        weights = aio.shares
    return IoPlan(
        folders=folders,
        nbytes=nbytes,
        passing=passing,
        stripe=Stripe(chunk, tuple(weight // math.gcd(*weights) for weight in weights)),
        engine=aio.engine,
        block_size=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.threads * len(folders),
        checksum_block=checksum_block(granule, aio.block_size, chunk) if aio.checksum else 0,
    )
