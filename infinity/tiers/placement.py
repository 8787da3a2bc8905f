"""Placement: for every (unit, state) its tier and its extent there, computed once, before anything is allocated.

The optimizer states of a unit share one extent, tile after tile, so that the update reads a tile's states in one
request:

    [tile 0: master or remainder | exp_avg | exp_avg_sq] [tile 1: ...] ...

Extents are read and written whole, or in ranges that start at a tile: so a checksum kept for every block of a file
covers bytes that are always written together, if blocks divide what ranges start at (`checksum_block`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from infinity.units.layout import UnitLayout

EXTENT_ALIGNMENT = 64 << 10
"""Bytes that every extent starts at a multiple of: the largest block with a checksum of its own, and so a whole number
of the blocks of any disk.
"""


class State(str, Enum):
    """What is kept of a unit. `OPTIM` bundles master (or remainder), exp_avg and exp_avg_sq, tile by tile."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"


_CALLED = {State.PARAM: "parameters", State.GRAD: "gradient", State.OPTIM: "optimizer states"}


@dataclass(frozen=True)
class Extent:
    """`nbytes` at `offset` of tier `tier`; every extent starts at a multiple of `EXTENT_ALIGNMENT`."""

    tier: str
    offset: int
    nbytes: int
    name: str
    """What it holds, for messages: "optimizer states of unit blocks.3"."""


@dataclass(frozen=True)
class StateFormat:
    """What a parameter's optimizer keeps, by name and dtype: `master` (fp32), `remainder` (int16) or neither, and
    moments.
    """

    states: tuple[tuple[str, torch.dtype], ...]

    @property
    def bytes_per_element(self) -> int:
        return sum(dtype.itemsize for _, dtype in self.states)

    @property
    def kind(self) -> str:
        """The name that `infinity._adam` gives the format."""
        first = self.states[0][0]
        return first if first in ("master", "remainder") else "fp32"


def state_format(dtype: torch.dtype, master: str) -> StateFormat:
    """The optimizer states of parameters of `dtype`; `master` is "remainder" or "fp32" and matters to 16-bit ones
    only.
    """
    moments = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
    if dtype == torch.float32:
        return StateFormat(moments)
    if master == "remainder":
        return StateFormat((("remainder", torch.int16), *moments))
    return StateFormat((("master", torch.float32), *moments))


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of a shard, and where the optimizer extent holds their states."""

    start: int
    stop: int
    offset: int
    nbytes: int

    def state_ranges(self, states: StateFormat) -> dict[str, tuple[int, int, torch.dtype]]:
        """name → (first byte within the tile, byte length, dtype)."""
        ranges = {}
        position = 0
        for name, dtype in states.states:
            length = (self.stop - self.start) * dtype.itemsize
            ranges[name] = (position, length, dtype)
            position += length
        return ranges


def tiles(shard_numel: int, tile_size: int, states: StateFormat) -> list[Tile]:
    """Cut a shard into update tiles of `tile_size` elements, the last one shorter."""
    cut = []
    for start in range(0, shard_numel, tile_size):
        stop = min(start + tile_size, shard_numel)
        width = states.bytes_per_element
        cut.append(Tile(start, stop, start * width, (stop - start) * width))
    return cut


@dataclass(frozen=True)
class Policy:
    """Which tier holds what, as the config asks, and what gradients are kept in. grad_tier None: never kept."""

    param_tier: str
    optim_tier: str
    grad_tier: str | None
    grad_dtype: torch.dtype | None
    """None: the parameters' own dtype."""
    master: str


@dataclass
class Placement:
    """Extents by (unit index, state), and the bytes each tier needs for them."""

    extents: dict[tuple[int, State], Extent] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, layout: UnitLayout, state: State, tier: str, nbytes: int) -> None:
        offset = self.nbytes.get(tier, 0)
        name = f"{_CALLED[state]} of unit {layout.name}"
        self.extents[layout.index, state] = Extent(tier, offset, nbytes, name)
        self.nbytes[tier] = offset + -(-nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT

    def of(self, unit: int, state: State) -> Extent:
        return self.extents[unit, state]

    def holds(self, unit: int, state: State) -> bool:
        return (unit, state) in self.extents


def place(layouts: Sequence[UnitLayout], policy: Policy) -> Placement:
    """Extents of one rank's shards. Frozen units have a `param` only."""
    placement = Placement()
    for layout in layouts:
        placement.add(layout, State.PARAM, policy.param_tier, layout.shard_nbytes)
        if not layout.trainable:
            continue
        states = state_format(layout.dtype, policy.master)
        placement.add(layout, State.OPTIM, policy.optim_tier, layout.shard_numel * states.bytes_per_element)
        if policy.grad_tier is not None:
            width = (policy.grad_dtype or layout.dtype).itemsize
            placement.add(layout, State.GRAD, policy.grad_tier, layout.shard_numel * width)
    return placement


def checksum_block(tile_size: int, block_size: int, chunk: int) -> int:
    """Bytes of a block with a checksum of its own: the most that extents, tiles, pieces of a request and chunks of a
    stripe are whole numbers of.

    tile_size: elements, of 2 bytes or a multiple of them. block_size, chunk: bytes. All are multiples of 4096.
    """
    return math.gcd(EXTENT_ALIGNMENT, 2 * tile_size, block_size, chunk)
