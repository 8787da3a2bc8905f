"""Sizes of all buffer pools. Pure.

Pools are sized here and nowhere else, so that a plan counts every buffer before one is allocated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infinity.plan.formats import StateFormat
from infinity.plan.layout import Discovered, UnitLayout
from infinity.plan.placement import EXTENT_ALIGNMENT, Placement, Policy, State, aligned
from infinity.plan.policy import DeviceInfo, RankInfo, updated_in
from infinity.plan.windows import RecordsFormat
from infinity.tier_kind import TierKind

if TYPE_CHECKING:
    from infinity.config import Config

UNITS = "units"
GRADIENTS = "gradients"
GRADIENTS_TO_REDUCE = "gradients to reduce"
GRADIENT_SHARDS = "gradient shards"
STORED_GRADIENTS = "stored gradients"
TILES = "tiles"
GRADIENT_TILES = "gradient tiles"
PARAMETER_SHARDS = "parameter shards"
STAGING = "staging"
READ_AHEAD = "reads ahead"
COLLECTIVES = "collectives"
ACTIVATIONS = "saved activations"

STAGING_BYTES = 8 << 20
"""Bytes of a staging buffer, through which a disk and a device that cannot share memory exchange data."""
STAGED_READS, STAGED_WRITES = 4, 2
"""Staging buffers for reads and for writes under way."""
_UNITS_READ_AHEAD = 2

# The unit that computes, and its parent.
_HELD = 2
_UPDATED = 1
_LEAVING = 1
"""Buffers that units have left, and whose comparison with the tier is under way."""
_AHEAD = 4
"""Number of units to prefetch by default: more if a block has more, fewer if the device has no room."""
_SHARE = 2
"""Divisor of the device's free memory: the rest is for activations, which a plan does not count."""
_NARROW = 16
"""Largest ratio of a buffer to a unit in it: a tiny unit does not take one of the few buffers of large ones."""
_IN_FLIGHT = 1 << 20
"""Total bytes up to which small buffers between threads are more than large ones would be."""
_SMALL = 256 << 10
"""Total bytes up to which any units that are held together have a buffer each."""
_STAYS = 16 << 20
"""Largest bytes of a model that stays resident: a fetch would take the host longer than the computation."""
_GRADIENTS_AT_ONCE = 4
# If the stored dtype is not the reduced one: the update reads one sum while the next is computed.
_SUMS_AT_ONCE = 2
PIECE_BYTES = 4 << 20
"""Bytes of a piece of a gradient that the host adds or converts: its copy hides the latency of the next one's, and it
stays in the cache for its sum."""
_PIECES_READ = 3
# Half of them are read ahead, the other half are being written.
_TILE_BUFFERS = 6
_WINDOWS_AT_ONCE = 3
"""Windows of whole parameters that are read, updated and written at once: their sizes differ, and may be large."""

EXCHANGE_BYTES = 16 << 20
"""Bytes of a rank's receive buffer for sums: two pieces per other rank, one being summed and one arriving."""
_PIECES = (256 << 10, 4 << 20)
"""Smallest and largest bytes of a piece: smaller ones cost round trips, larger ones exceed the cache."""
_LINE = 64
"""Alignment of a piece in bytes: whole elements of every dtype."""
_PAGE = 4096
_WIDEST = 4
"""Bytes of the largest element that is summed."""


@dataclass(frozen=True)
class PoolSpec:
    """Buffers of one pool, in memory of the device or the host. sizes: buffer bytes → count."""

    name: str
    tier: TierKind
    sizes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        return sum(size * count for size, count in self.sizes.items())


def unit_pool(
    config: Config,
    discovered: Discovered,
    layouts: Sequence[UnitLayout],
    policy: Policy,
    room: int | None = None,
    *,
    repeats: bool = False,
    leaves_late: bool = False,
) -> tuple[PoolSpec, int]:
    """Return the pool of device buffers for units, and the bytes of units to prefetch.

    The buffers suffice for the units that nested modules hold at once, the next ones, those cached, and one whose
    update is being written, as long as units are used in their order or its reverse. repeats: the first units follow
    the last, as in inference. leaves_late: sizes with several buffers have one more, for a unit that is leaving. room:
    bytes of the device for these buffers, the activations and everything else. By default, buffers take at most half
    of it, but at least one unit is prefetched. Without units there are none.
    """
    if not layouts:
        return PoolSpec(UNITS, TierKind.DEVICE, {}), 0
    sizes = [layout.nbytes for layout in layouts]
    if policy.resident:
        return PoolSpec(UNITS, TierKind.DEVICE, size_classes(sizes, 0, [sizes])), sum(sizes)
    asked, largest = config.infinity.prefetch_bytes, max(sizes)
    beside = cached_bytes(config, layouts) // largest + _UPDATED

    def pool(ahead: Sequence[range]) -> PoolSpec:
        return _unit_buffers(sizes, ahead, discovered, beside, repeats=repeats, leaves_late=leaves_late)

    if asked != "auto":
        prefetch = max(int(asked), largest) if asked else 0  # a smaller budget would hold a buffer and never fill it
        return pool(list(_runs(sizes, prefetch))), prefetch
    count = max([_AHEAD, *map(len, discovered.blocks)])
    while True:
        ahead = [range(start, min(start + count, len(sizes))) for start in range(len(sizes))]
        found = pool(ahead)
        if count == 1 or room is None or found.nbytes <= room // _SHARE:
            return found, max(sum(sizes[run.start : run.stop]) for run in ahead)
        count -= 1


def least_unit_bytes(
    discovered: Discovered, layouts: Sequence[UnitLayout], *, repeats: bool = False, leaves_late: bool = False
) -> int:
    """Return the bytes of the pool of units if none is prefetched or cached."""
    sizes = [layout.nbytes for layout in layouts]
    ahead = list(_runs(sizes, 0))
    return _unit_buffers(sizes, ahead, discovered, _UPDATED, repeats=repeats, leaves_late=leaves_late).nbytes


def _unit_buffers(
    sizes: Sequence[int],
    ahead: Sequence[range],
    discovered: Discovered,
    beside: int,
    *,
    repeats: bool,
    leaves_late: bool,
) -> PoolSpec:
    together = _together(sizes, ahead, discovered.held_together, beside, repeats=repeats)
    classes = size_classes(sizes, _HELD + beside, together)
    return PoolSpec(UNITS, TierKind.DEVICE, _and_leaving(classes, sizes) if leaves_late else classes)


def _and_leaving(classes: Mapping[int, int], sizes: Sequence[int]) -> dict[int, int]:
    """Add a buffer to each class of several that has fewer than units [Note: who waits for a fingerprint].

    The largest units, such as an embedding and a head, often have one buffer and leave it once a pass.
    """
    found, below = {}, 0
    for size, count in sorted(classes.items()):
        units = sum(below < each <= size for each in sizes)
        found[size] = min(units, count + _LEAVING) if count > 1 else count
        below = size
    return found


def _runs(sizes: list[int], nbytes: int) -> Iterator[range]:
    """Yield the longest runs of consecutive units of at most `nbytes`."""
    start = total = 0
    for end, size in enumerate(sizes):
        total += size
        while total > nbytes:
            total -= sizes[start]
            start += 1
        yield range(start, end + 1)


def _together(
    sizes: Sequence[int], ahead: Iterable[range], held: Collection[frozenset[int]], beside: int, *, repeats: bool
) -> Iterator[list[int]]:
    """Yield sets of units, as sizes, that have a buffer at once: those that nested modules hold with the unit in use, a
    run of units ahead, and the `beside` units used before. Forwards and in reverse.
    """
    count = len(sizes)
    holding: dict[int, list[frozenset[int]]] = defaultdict(lambda: [frozenset()])
    for units in held:
        yield [sizes[unit] for unit in units]
        for unit in units:
            holding[unit].append(units)
    for run in ahead:
        before, after = range(run.start - 1 - beside, run.start), range(run.stop, run.stop + 1 + beside)
        for used, behind in ((run.start - 1, before), (run.stop, after)):
            near = {unit % count for unit in (*run, *behind) if repeats or 0 <= unit < count}
            for units in holding[used % count if repeats else used]:
                yield [sizes[unit] for unit in near | units]


def cached_bytes(config: Config, layouts: Sequence[UnitLayout]) -> int:
    """Return the bytes of units that stay resident: `infinity.cache_bytes`."""
    if not layouts:
        return 0
    asked = config.infinity.cache_bytes
    if asked != "auto":
        return int(asked)
    whole = max(layout.nbytes for layout in layouts) * len(layouts)
    return whole if whole <= _STAYS else 0


def gradient_pools(
    layouts: Sequence[UnitLayout],
    policy: Policy,
    placement: Placement,
    ranks: RankInfo,
    device: DeviceInfo,
    *,
    debug: bool,
) -> Iterator[PoolSpec]:
    """Yield the pools of gradients on the way from `.grad` to their tier. layouts: of trained units."""
    dtypes = [policy.grads(layout.dtype) for layout in layouts]
    collected = [x.numel * kept.collected.itemsize for x, kept in zip(layouts, dtypes, strict=True)]
    reduced = [x.numel * kept.reduced.itemsize for x, kept in zip(layouts, dtypes, strict=True)]
    stored = [x.shard_numel * kept.stored.itemsize for x, kept in zip(layouts, dtypes, strict=True)]
    tiers = [placement.of(layout.index, State.GRAD).tier for layout in layouts]
    few = _in_flight(_GRADIENTS_AT_ONCE, max(collected), debug=debug)
    at_once = len(layouts) if policy.grads_whole else few
    if any(kept.collected != kept.reduced for kept in dtypes):
        yield PoolSpec(GRADIENTS_TO_REDUCE, TierKind.DEVICE, _of_neighbours(reduced, few))
    leaving = [nbytes // ranks.shards for nbytes, tier in zip(reduced, tiers, strict=True) if not tier.on_device]
    if leaving and not device.host_addressable:
        yield PoolSpec(GRADIENT_SHARDS, TierKind.HOST, _of_neighbours(leaving, few))
    yield PoolSpec(GRADIENTS, TierKind.DEVICE, _of_neighbours(collected, at_once))
    whole, read = [], []
    for nbytes, tier, kept in zip(stored, tiers, dtypes, strict=True):
        if _adds_in_place(policy, tier):
            continue
        if kept.reduced != kept.stored or (tier.on_device and not device.host_addressable):
            whole.append(nbytes)
        elif not tier.in_memory:
            read.append(min(aligned(nbytes), PIECE_BYTES + 2 * EXTENT_ALIGNMENT))
    if not all(_adds_in_place(policy, tier) for tier in tiers):
        sums = _SUMS_AT_ONCE if any(kept.reduced != kept.stored for kept in dtypes) else 1
        sizes = ({max(read): _PIECES_READ} if read else {}) | ({max(whole): sums} if whole else {})
        yield PoolSpec(STORED_GRADIENTS, TierKind.DEVICE if policy.grad_tier.on_device else TierKind.HOST, sizes)


def _of_neighbours(sizes: Sequence[int], at_once: int) -> dict[int, int]:
    """Return size classes with which any `at_once` consecutive units can have gradients in transit together.

    Backward reaches units in order, so an embedding and a head, the largest and the farthest apart, share a buffer. In
    another order gradients wait for one another.
    """
    return size_classes(sizes, at_once, (sizes[start : start + at_once] for start in range(len(sizes))))


def _adds_in_place(policy: Policy, tier: TierKind) -> bool:
    """Return whether gradients are added to those stored in `tier` in place: in reserved memory."""
    return tier.in_memory and not policy.passes(tier)


def update_pools(
    layouts: Sequence[UnitLayout], policy: Policy, placement: Placement, device: DeviceInfo, *, debug: bool
) -> Iterator[PoolSpec]:
    """Yield the pools of the update. Tiles of states in memory need no buffers. layouts: of trained units."""

    def in_files(state: State, *, whole: bool) -> list[UnitLayout]:
        """Return the units with `state` in files. whole: those that are updated parameter by parameter."""
        return [
            layout
            for layout in layouts
            if bool(layout.windows) is whole and not placement.of(layout.index, state).tier.in_memory
        ]

    cut = [
        (layout, policy.states(layout), min(layout.shard_numel, placement.tile_sizes[layout.index]))
        for layout in in_files(State.OPTIM, whole=False)
    ]
    states = [form.nbytes(numel) for _, form, numel in cut if isinstance(form, StateFormat)]
    grads = [
        policy.grads(layout.dtype).stored.itemsize * min(layout.shard_numel, placement.tile_sizes[layout.index])
        for layout in in_files(State.GRAD, whole=False)
    ]
    count = _in_flight(_TILE_BUFFERS, max([*states, *grads], default=0), debug=debug)
    records = [nbytes for layout in in_files(State.OPTIM, whole=True) for _, nbytes in RecordsFormat(layout).windows]
    whole = [
        policy.grads(layout.dtype).stored.itemsize * (window.stop - window.start)
        for layout in in_files(State.GRAD, whole=True)
        for window in layout.windows
    ]
    for name, tiles, windows in ((TILES, states, records), (GRADIENT_TILES, grads, whole)):
        sizes = _of_neighbours(windows, _WINDOWS_AT_ONCE) if windows else {}
        if tiles:
            sizes[max(tiles)] = max(count, sizes.get(max(tiles), 0))
        yield PoolSpec(name, TierKind.HOST, sizes)
    staged = [
        layout.shard_nbytes
        for layout in layouts
        if updated_in(placement, layout.index, host_addressable=device.host_addressable) == "staging"
    ]
    if staged:
        yield PoolSpec(PARAMETER_SHARDS, TierKind.HOST, {max(staged): 2})


def reads_ahead(tile_buffers: int) -> int:
    """Return the number of tiles to read ahead of compute, with this many buffers of tiles (0: tiles are views)."""
    return max(tile_buffers, _TILE_BUFFERS) // 2


def _in_flight(count: int, nbytes: int, *, debug: bool) -> int:
    """Return the number of buffers of `nbytes` where `count` large ones are needed: up to sixteen times as many small
    ones, since a thread that waits for one is woken after a longer time than the next thread needs it.
    `infinity.debug` adds none, so that buffers are reused early.
    """
    return count if debug else max(count, min(16 * count, _IN_FLIGHT // max(nbytes, 1)))


def staging_pools(config: Config, layouts: Sequence[UnitLayout], placement: Placement) -> list[PoolSpec]:
    """Return the pools through which nvme and a device that the host cannot address exchange data.

    Parameters on nvme are read into host buffers before a device buffer is free for them.
    """
    pools = [PoolSpec(STAGING, TierKind.HOST, {STAGING_BYTES: STAGED_READS + STAGED_WRITES})]
    extents = [placement.of(layout.index, State.PARAM) for layout in layouts]
    on_nvme = [extent.nbytes for extent in extents if not extent.tier.in_memory]
    largest = max(on_nvme, default=0)
    asked = config.infinity.read_ahead_bytes
    nbytes = _UNITS_READ_AHEAD * largest if asked == "auto" else int(asked)
    if on_nvme and nbytes:
        size = min(STAGING_BYTES, -(-largest // _PAGE) * _PAGE)
        pools.append(PoolSpec(READ_AHEAD, TierKind.HOST, {size: -(-nbytes // size)}))
    return pools


def exchange_piece(largest_sum: int, ranks: int) -> int:
    """Return the bytes of a piece in exchanges between pairs of ranks. largest_sum: bytes of the largest part."""
    low, high = _PIECES
    piece = max(low, min(high, EXCHANGE_BYTES // (2 * max(1, ranks - 1))))
    return min(piece // _LINE, -(-largest_sum // _LINE)) * _LINE


def largest_sum(layouts: Sequence[UnitLayout], ranks: int) -> int:
    """Return the bytes of a rank's part of the largest gradient."""
    largest = max((layout.numel for layout in layouts if layout.trainable), default=0)
    return -(-largest // ranks) * _WIDEST


def exchange_pool(layouts: Sequence[UnitLayout], ranks: RankInfo) -> PoolSpec:
    """Return the receive buffer of exchanges between pairs of ranks (gloo)."""
    nbytes = 2 * (ranks.size - 1) * exchange_piece(largest_sum(layouts, ranks.size), ranks.size)
    return PoolSpec(COLLECTIVES, TierKind.HOST, {nbytes: 1})


def size_classes(sizes: Sequence[int], depth: int, together: Iterable[Sequence[int]] = ()) -> dict[int, int]:
    """Return buffer size → count for units of these sizes, in the fewest bytes.

    sizes: bytes of each unit. together: sets of units, as sizes, that have a buffer at once. Any `depth` units of at
    most `_SMALL` bytes have one, too; of larger ones at least one does.

    A class that serves n units has at most n buffers of its largest unit's size, and none serves a unit of less than
    1/`_NARROW` of that size. Classes are contiguous ranges of the sorted sizes; dynamic programming finds the best
    partition.
    """
    distinct = sorted(set(sizes))
    counts = [sizes.count(size) for size in distinct]
    most_together = _most(distinct, together)

    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    """For the first k distinct sizes: bytes, where the last class starts, and its buffers."""
    for end in range(1, len(distinct) + 1):
        largest = distinct[end - 1]
        least = depth if largest <= _SMALL else 1
        most = most_together(end).tolist()
        options = []
        for start in range(bisect_left(distinct, -(-largest // _NARROW)), end):
            buffers = min(sum(counts[start:end]), max(least, most[start]))
            options.append((best[start][0] + buffers * largest, start, buffers))
        best.append(min(options))
    classes: dict[int, int] = {}
    end = len(distinct)
    while end:
        _, start, classes[distinct[end - 1]] = best[end]
        end = start
    return classes


def _most(distinct: Sequence[int], sets: Iterable[Sequence[int]]) -> Callable[[int], torch.Tensor]:
    """Return a function: end → (end,) the most units that a set has of the sizes `distinct[start:end]`, by start."""
    unlike = {tuple(sorted(one)) for one in sets} or {()}
    below = torch.tensor([[bisect_left(one, size) for size in (*distinct, math.inf)] for one in unlike])
    return lambda end: (below[:, end : end + 1] - below[:, :end]).amax(0)
