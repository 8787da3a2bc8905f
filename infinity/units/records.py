"""Reads and writes the optimizer states of one unit's shard by name, in the records of its tiles.

A record in memory is read and written state by state, without a buffer. One on a disk is transferred whole, as its
checksums and direct I/O require.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from infinity.plan.formats import Range, StateFormat
from infinity.plan.placement import Extent, Tile
from infinity.tiers.base import Tier
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import Transfer

_BUFFERS = 2
_ZEROS = 16 << 20
"""Bytes of zeros that are written at once."""

Flats = dict[str, torch.Tensor]
"""State name → flat tensor: `master` (numel,) in fp32 and moments in the unit's format (`infinity.plan.formats`), or
`param` (numel,) in the unit's dtype.
"""


def flat_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed, page-aligned host tensor (numel,)."""
    return host_tensor(numel * dtype.itemsize).view(dtype)


@dataclass(frozen=True)
class Records:
    """The records of a shard's tiles in an extent. shards: state name → values of the whole shard, in its format."""

    tier: Tier
    extent: Extent
    states: StateFormat
    tiles: Sequence[Tile]

    def write(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Write all states. Those left out of `shards` become zero."""
        if not self.tier.kind.in_memory:
            return self._write_whole(shards)
        for tile, ranges in self._ranges():
            for name, place in ranges.items():
                offset = tile.offset + place.first
                if name in shards:
                    self.tier.write(self.extent, _part(shards[name], place, tile).view(torch.uint8), offset).wait()
                else:
                    self._clear(offset, place.nbytes)

    def read(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Fill `shards`, which has every state."""
        if not self.tier.kind.in_memory:
            return self._read_whole(shards)
        for tile, ranges in self._ranges():
            for name, place in ranges.items():
                target = _part(shards[name], place, tile).view(torch.uint8)
                self.tier.read(self.extent, target, tile.offset + place.first).wait()

    def sync_masters(self, changed: torch.Tensor, values: torch.Tensor) -> None:
        """Set the masters of `changed` elements, bool (shard_numel,), to `values`, (shard_numel,) of 16 bits."""
        for tile, ranges in self._ranges():
            part = slice(tile.start, tile.stop)
            # An edit of one layer leaves most tiles alone, and each costs a read and a write.
            if not changed[part].any():
                continue
            # A remainder of 0 makes the master equal to the edited parameter, without loss.
            name = "remainder" if "remainder" in ranges else "master"
            place = ranges[name]
            offset, first, nbytes = tile.offset, place.first, tile.nbytes
            if self.tier.kind.in_memory:
                offset, first, nbytes = tile.offset + place.first, 0, place.nbytes
            record = host_tensor(nbytes)
            self.tier.read(self.extent, record, offset).wait()
            field = record[first : first + place.nbytes].view(place.kind.dtype)
            field[changed[part]] = 0 if name == "remainder" else values[part][changed[part]].float()
            self.tier.write(self.extent, record, offset).wait()

    def _write_whole(self, shards: Mapping[str, torch.Tensor]) -> None:
        writing: deque[Transfer] = deque()
        for (tile, ranges), buffer in zip(self._ranges(), self._buffers(), strict=False):
            # The buffer that comes next is the one whose write was started first.
            if len(writing) == _BUFFERS:
                writing.popleft().wait()
            for name, place in ranges.items():
                field = place.of(buffer)
                if name in shards:
                    field.copy_(_part(shards[name], place, tile))
                elif tile is self.tiles[-1]:
                    field.zero_()  # buffers start as zeros; a shorter last tile lays its fields out differently
            writing.append(self.tier.write(self.extent, buffer[: tile.nbytes], tile.offset))
        while writing:
            writing.popleft().wait()

    def _read_whole(self, shards: Mapping[str, torch.Tensor]) -> None:
        for (tile, ranges), buffer in zip(self._ranges(), self._buffers(), strict=False):
            self.tier.read(self.extent, buffer[: tile.nbytes], tile.offset).wait()
            for name, place in ranges.items():
                _part(shards[name], place, tile).copy_(place.of(buffer))

    def _clear(self, offset: int, nbytes: int) -> None:
        zeros = host_tensor(min(nbytes, _ZEROS))
        for start in range(0, nbytes, _ZEROS):
            piece = zeros[: nbytes - start]
            self.tier.write(self.extent, piece, offset + start).wait()

    def _ranges(self) -> Iterator[tuple[Tile, dict[str, Range]]]:
        return ((tile, self.states.ranges(tile.stop - tile.start)) for tile in self.tiles)

    def _buffers(self) -> Iterator[torch.Tensor]:
        return cycle([host_tensor(self.tiles[0].nbytes) for _ in range(_BUFFERS)])


def _part(shard: torch.Tensor, place: Range, tile: Tile) -> torch.Tensor:
    """Return the values of a tile in those of the whole shard."""
    return shard[place.kind.part(tile.start, tile.stop)]
