"""Reads and writes the optimizer states of one unit's shard by name, in the records of its tiles.

A record in memory is read and written state by state, without a buffer. One on a disk is transferred whole, as its
checksums and direct I/O require.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch

from infinity.plan.formats import Range, StateFormat
from infinity.plan.placement import Extent, Tile
from infinity.tiers.base import Tier
from infinity.tiers.memory import host_tensor
from infinity.tiers.transfer import Transfer

_BUFFERS = 2
_ZEROS = 16 << 20
"""Bytes of zeros that are written at once."""


class _Part(NamedTuple):
    """Elements [start, stop) of a shard that lie in one tile, and the byte range of each state in the tile's record."""

    tile: Tile
    ranges: Mapping[str, Range]
    start: int
    stop: int

    def place(self, state: Range) -> tuple[int, int]:
        """Return (offset, bytes) of the part's values of a state in the extent."""
        inside = state.kind.part(self.start - self.tile.start, self.stop - self.tile.start)
        width = state.kind.dtype.itemsize
        return self.tile.offset + state.first + inside.start * width, (inside.stop - inside.start) * width


@dataclass(frozen=True)
class Records:
    """The records of a shard's tiles in an extent.

    Values are flat tensors by name of the state, in its format, of elements [start, stop) of the shard; by default of
    all. On a disk a range consists of whole tiles. start: a multiple of `formats.BLOCK`.
    """

    tier: Tier
    extent: Extent
    states: StateFormat
    tiles: Sequence[Tile]

    def write(self, values: Mapping[str, torch.Tensor], start: int = 0, stop: int | None = None) -> None:
        """Write all states. Those left out of `values` become zero."""
        if not self.tier.kind.in_memory:
            return self._write_whole(values, start, stop)
        for part in self._parts(start, stop):
            for name, state in part.ranges.items():
                offset, nbytes = part.place(state)
                if name in values:
                    source = _values(values[name], state, part, start).view(torch.uint8)
                    self.tier.write(self.extent, source, offset).wait()
                else:
                    self._clear(offset, nbytes)

    def read(self, values: Mapping[str, torch.Tensor], start: int = 0, stop: int | None = None) -> None:
        """Fill `values`, which has every state."""
        if not self.tier.kind.in_memory:
            return self._read_whole(values, start, stop)
        for part in self._parts(start, stop):
            for name, state in part.ranges.items():
                target = _values(values[name], state, part, start).view(torch.uint8)
                self.tier.read(self.extent, target, part.place(state)[0]).wait()

    def sync_masters(self, changed: torch.Tensor, values: torch.Tensor) -> None:
        """Set the masters of `changed` elements, bool (shard_numel,), to `values`, (shard_numel,) of 16 bits."""
        for tile, ranges, start, stop in self._parts(0, None):
            part = slice(start, stop)
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

    def _write_whole(self, values: Mapping[str, torch.Tensor], start: int, stop: int | None) -> None:
        writing: deque[Transfer] = deque()
        for part, buffer in zip(self._parts(start, stop), self._buffers(), strict=False):
            # The buffer that comes next is the one whose write was started first.
            if len(writing) == _BUFFERS:
                writing.popleft().wait()
            for name, state in part.ranges.items():
                field = state.of(buffer)
                if name in values:
                    field.copy_(_values(values[name], state, part, start))
                elif part.tile is self.tiles[-1]:
                    field.zero_()  # buffers start as zeros; a shorter last tile lays its fields out differently
            writing.append(self.tier.write(self.extent, buffer[: part.tile.nbytes], part.tile.offset))
        while writing:
            writing.popleft().wait()

    def _read_whole(self, values: Mapping[str, torch.Tensor], start: int, stop: int | None) -> None:
        # One buffer: a read ends before its values are copied, and callers read little at once.
        buffer = host_tensor(self.tiles[0].nbytes)
        for part in self._parts(start, stop):
            self.tier.read(self.extent, buffer[: part.tile.nbytes], part.tile.offset).wait()
            for name, state in part.ranges.items():
                _values(values[name], state, part, start).copy_(state.of(buffer))

    def _clear(self, offset: int, nbytes: int) -> None:
        zeros = host_tensor(min(nbytes, _ZEROS))
        for start in range(0, nbytes, _ZEROS):
            piece = zeros[: nbytes - start]
            self.tier.write(self.extent, piece, offset + start).wait()

    def _parts(self, start: int, stop: int | None) -> Iterator[_Part]:
        """Yield the parts of elements [start, stop) of the shard, in order. stop: None means to its end."""
        # Tiles are equally long, except the last one.
        size, end = self.tiles[0].stop, self.tiles[-1].stop if stop is None else stop
        for tile in self.tiles[start // size : -(-end // size)]:
            ranges = self.states.ranges(tile.stop - tile.start)
            yield _Part(tile, ranges, max(start, tile.start), min(end, tile.stop))

    def _buffers(self) -> Iterator[torch.Tensor]:
        return cycle([host_tensor(self.tiles[0].nbytes) for _ in range(_BUFFERS)])


def _values(values: torch.Tensor, state: Range, part: _Part, start: int) -> torch.Tensor:
    """Return the values of a part in those of the shard's elements from `start` on."""
    return values[state.kind.part(part.start - start, part.stop - start)]
