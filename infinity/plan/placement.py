"""Placement: tier and extent of every (unit, state), computed once, before any allocation.

The optimizer states of a unit share one extent, tile after tile, so that the update reads a tile's states in one
request:

    [tile 0: remainder | exp_avg | exp_avg_sq] [tile 1: ...] ...

Extents are read and written whole, or in ranges that start at a tile. So a checksum per block covers bytes that are
always written together, if the block size divides the starts of ranges (`checksum_block`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch

from infinity.plan.formats import GradDtypes, Range, StateFormat
from infinity.plan.frozen import FrozenCode
from infinity.plan.layout import UnitLayout
from infinity.plan.windows import RecordsFormat
from infinity.tier_kind import TierKind

EXTENT_ALIGNMENT = 64 << 10
"""Alignment of extents in bytes: the largest checksum block, and a multiple of the blocks of any disk."""

DISK_TILE = 1 << 20
"""Elements of a tile on nvme: six buffers of it are allocated, and larger ones are no faster."""
RANGE = 1 << 20
"""Elements that `shard_ranges` has in memory at once, over all shards in memory, or of each on a disk in such tiles."""
WHOLE_SHARD = 1 << 40
"""Elements of a tile in memory, at least those of any shard: a unit is one call of the kernel."""


class State(str, Enum):
    """States of a unit that have extents. `OPTIM` bundles master (or remainder) and moments, tile by tile."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"


CALLED = {State.PARAM: "parameters", State.GRAD: "gradient", State.OPTIM: "optimizer states"}


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a tier; offsets are multiples of `EXTENT_ALIGNMENT`."""

    tier: TierKind
    offset: int
    nbytes: int
    name: str
    """Description for messages, such as "optimizer states of unit blocks.3"."""
    code: FrozenCode | None = None
    """Code of frozen parameters; None: the bytes are those of the state."""


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of a shard; their states are bytes [offset, offset + nbytes) of the optimizer extent."""

    start: int
    stop: int
    offset: int
    nbytes: int


class TileLayout(NamedTuple):
    """A tile, and the byte range of each state in it; of whole parameters, the slots and the byte of each record."""

    tile: Tile
    ranges: dict[str, Range]
    records: Mapping[int, int] = MappingProxyType({})


def tiles(shard_numel: int, tile_size: int, states: StateFormat) -> list[Tile]:
    """Cut a shard into update tiles of `tile_size` elements, the last one shorter."""
    cut: list[Tile] = []
    offset = 0
    for start in range(0, shard_numel, tile_size):
        stop = min(start + tile_size, shard_numel)
        cut.append(Tile(start, stop, offset, states.nbytes(stop - start)))
        offset += cut[-1].nbytes
    return cut


def unit_tiles(layout: UnitLayout, rank: int, tile_size: int, states: StateFormat | RecordsFormat) -> list[TileLayout]:
    """Return the tiles of `rank`'s shard of a unit: runs of `tile_size` elements, or its windows."""
    if not isinstance(states, RecordsFormat):
        cut = tiles(layout.shard_numel, tile_size, states)
        return [TileLayout(tile, states.ranges(tile.stop - tile.start)) for tile in cut]
    found, (low, high) = [], layout.shard_range(rank)
    for window, (offset, nbytes) in zip(layout.windows, states.windows, strict=True):
        if low <= window.start < high:
            before = rank * states.shard_nbytes + offset
            records = {slot: states.places[slot] - before for slot in range(window.first, window.last)}
            found.append(TileLayout(Tile(window.start - low, window.stop - low, offset, nbytes), {}, records))
    return found


def shard_ranges(layout: UnitLayout, tile_size: int | None) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of a shard's elements in which checkpoints read and write it, so that memory
    holds a part of the unit. The same for every shard.

    tile_size: elements of the tiles of optimizer states on a disk; None: they are in memory, or the unit is frozen.
    """
    numel = step = layout.shard_numel
    # The records of whole parameters and the code of a shard are read at once.
    if not layout.windows and layout.code is None:
        # Parameters begin at a block with a checksum (in elements of a byte, so in all), states on a disk at a tile.
        step = math.lcm(EXTENT_ALIGNMENT, tile_size or 1)
        step *= max(1, RANGE // layout.world_size // step)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


@dataclass(frozen=True)
class Policy:
    """Tiers and formats of states, from the config. A budget may place states of some units in faster tiers."""

    param_tier: TierKind
    optim_tier: TierKind
    grad_tier: TierKind
    grads: Callable[[torch.dtype], GradDtypes]
    """Dtype of parameters → dtypes of their gradients."""
    states: Callable[[UnitLayout], StateFormat | RecordsFormat]
    """Unit → format of its optimizer states."""
    tile_size: int | None = None
    """Elements of a tile; None: by the tiers of the unit (`tile_of`)."""
    grads_pass: bool = False
    """True if the update consumes gradients as they arrive. Their tier stores gradients only in steps that use units in
    a new order, such as the first, and has memory or space for them only during these steps."""
    resident: bool = False
    """True if every unit stays in a device buffer."""
    grads_whole: bool = False
    """True if gradients of all units are summed over micro-batches in device buffers before they are reduced."""

    def passes(self, tier: TierKind) -> bool:
        """Return whether memory or space of gradients stored in `tier` is held only while it is used. Device memory
        that a budget gives to some units is reserved."""
        return self.grads_pass and (not tier.on_device or self.grad_tier == tier)

    def tier_of(self, state: State) -> TierKind:
        """Return the tier of a state without a budget, which is the slowest one with a budget."""
        return {State.PARAM: self.param_tier, State.OPTIM: self.optim_tier, State.GRAD: self.grad_tier}[state]

    def tile_of(self, *tiers: TierKind) -> int:
        """Return the elements of a tile of a unit with its gradient and optimizer states in `tiers`."""
        if self.tile_size is not None:
            return self.tile_size
        return WHOLE_SHARD if all(tier.in_memory for tier in tiers) else DISK_TILE


@dataclass(frozen=True)
class Placement:
    """Extents by (unit index, state), and the bytes each tier needs for them."""

    extents: Mapping[tuple[int, State], Extent]
    nbytes: Mapping[TierKind, int]
    passing: Mapping[TierKind, int]
    """Tier → bytes of gradients whose memory or space is held while it is used (`Policy.grads_pass`). In files they
    follow the other extents."""
    tile_sizes: Mapping[int, int]
    """Trained unit → elements of its tiles."""
    granule: int = EXTENT_ALIGNMENT
    """Alignment in bytes of extents and of the ranges in which they are read and written."""
    spares: Mapping[tuple[int, State], Extent] = field(default_factory=dict)
    """Second slots of states of units whose updates may be drafts (`infinity.plan.drafts`)."""

    def of(self, unit: int, state: State) -> Extent:
        return self.extents[unit, state]

    def holds(self, unit: int, state: State) -> bool:
        return (unit, state) in self.extents

    def ranges(self, layout: UnitLayout) -> list[tuple[int, int]]:
        """Return the `shard_ranges` of a unit."""
        on_disk = layout.trainable and not self.of(layout.index, State.OPTIM).tier.in_memory
        return shard_ranges(layout, self.tile_sizes[layout.index] if on_disk else None)

    def spares_in(self, tier: TierKind) -> Mapping[Extent, Extent]:
        """Return extent → second slot of the extents in `tier` that have one."""
        return {self.extents[key]: slot for key, slot in self.spares.items() if slot.tier is tier}

    def tiers(self, *states: State) -> set[TierKind]:
        """Return the tiers that hold extents of `states`."""
        return {extent.tier for (_, state), extent in self.extents.items() if state in states}


def place(
    layouts: Sequence[UnitLayout],
    policy: Policy,
    faster: Mapping[tuple[int, State], TierKind] | None = None,
    twice: Collection[tuple[int, State]] = (),
) -> Placement:
    """Return the extents of one rank's shards. Frozen units have a `param` extent only.

    faster: (unit index, state) → tier, instead of the policy's. twice: states with a second slot.
    """
    extents: dict[tuple[int, State], Extent] = {}
    used: dict[TierKind, int] = {}
    passing: dict[TierKind, int] = {}
    tile_sizes: dict[int, int] = {}
    granule = EXTENT_ALIGNMENT
    chosen = faster or {}

    def tier_of(layout: UnitLayout, state: State) -> TierKind:
        return chosen.get((layout.index, state)) or policy.tier_of(state)

    def add(layout: UnitLayout, state: State, nbytes: int) -> None:
        tier = tier_of(layout, state)
        counted = passing if state is State.GRAD and policy.passes(tier) else used
        offset = counted.get(tier, 0)
        name, code = f"{CALLED[state]} of unit {layout.name}", layout.code if state is State.PARAM else None
        extents[layout.index, state] = Extent(tier, offset, nbytes, name, code)
        counted[tier] = offset + aligned(nbytes)

    for layout in layouts:
        add(layout, State.PARAM, layout.stored_nbytes)
        if not layout.trainable:
            continue
        states, width = policy.states(layout), policy.grads(layout.dtype).stored.itemsize
        tile = tile_sizes[layout.index] = policy.tile_of(tier_of(layout, State.OPTIM), tier_of(layout, State.GRAD))
        if isinstance(states, RecordsFormat):
            tile_sizes[layout.index] = max(window.stop - window.start for window in layout.windows)
            add(layout, State.OPTIM, states.shard_nbytes)
        else:
            full, rest = divmod(layout.shard_numel, tile)
            add(layout, State.OPTIM, full * states.nbytes(tile) + states.nbytes(rest))
            granule = math.gcd(granule, states.nbytes(tile), tile * width)
        add(layout, State.GRAD, layout.shard_numel * width)
    spares: dict[tuple[int, State], Extent] = {}
    for key in sorted(twice):
        extent = extents[key]
        spares[key] = replace(extent, offset=used[extent.tier])
        used[extent.tier] += aligned(extent.nbytes)
    for tier in passing:
        first = used.setdefault(tier, 0) if not tier.in_memory else 0
        for key, extent in extents.items():
            if key[1] is State.GRAD and extent.tier is tier:
                extents[key] = replace(extent, offset=first + extent.offset)
    return Placement(extents, used, passing, tile_sizes, granule, spares)


def aligned(nbytes: int) -> int:
    """Return the bytes that an extent of `nbytes` takes in its tier."""
    return -(-nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT


def checksum_block(granule: int, block_size: int, chunk: int) -> int:
    """Return the bytes of a checksum block: the largest that divides extents, their ranges, the pieces of a request
    and the chunks of a stripe.

    granule: `Placement.granule`. block_size: bytes of a piece. chunk: bytes of a chunk. All are multiples of 4096.
    """
    return math.gcd(granule, block_size, chunk)
