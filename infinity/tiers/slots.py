"""The two slots of durable extents: one holds the committed bytes, the other those written since.

A commit is all or nothing. Until it is complete, nothing writes the slots of the commit before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity import concurrency
from infinity.plan.io import Durable


@dataclass(frozen=True)
class Piece:
    """Bytes of a file: [offset, offset + nbytes). start: their place in the memory that is read or written."""

    offset: int
    start: int
    nbytes: int


@dataclass
class _Pair:
    places: tuple[int, int]
    nbytes: int
    committed: int = 1
    """Slot of the committed bytes; before any commit both are empty, and writes begin in slot 0."""
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [start, stop) that were written since the last commit, into the other slot; sorted and disjoint."""
    drafted: bool = False
    """True while the committed bytes stay the present ones, although others are written."""

    @property
    def present(self) -> int:
        """Slot of the present bytes, if they are in one."""
        return 1 - self.committed if self.fresh else self.committed

    @property
    def is_whole(self) -> bool:
        return not self.fresh or self.fresh == [(0, self.nbytes)]


class Slots:
    """Slots of all durable extents of a tier. Thread-safe."""

    def __init__(self, extents: Sequence[Durable], committed: bytes | None) -> None:
        """committed: slot of each extent's committed bytes, as of `seal`; None: nothing is committed."""
        self._pairs = {e.first.offset: _Pair((e.first.offset, e.second.offset), e.first.nbytes) for e in extents}
        """Offset of the first slot, by which an extent is named → its pair; in the order of the plan."""
        self._access = concurrency.lock()
        if committed is not None:
            self.commit(committed)

    def holds(self, extent: int) -> bool:
        """Return whether the extent at this offset is durable."""
        return extent in self._pairs

    def to_read(self, extent: int, offset: int, nbytes: int) -> list[Piece]:
        """Return where the present bytes [offset, offset + nbytes) of an extent are."""
        with self._access:
            pair = self._pairs[extent]
            if pair.drafted:
                return [Piece(pair.places[pair.committed] + offset, 0, nbytes)]
            if pair.is_whole:
                return [Piece(pair.places[pair.present] + offset, 0, nbytes)]
            return list(_pieces(pair, offset, offset + nbytes))

    def to_write(self, extent: int, offset: int, nbytes: int) -> int:
        """Return where to write these bytes, which are the present ones from now on."""
        with self._access:
            pair = self._pairs[extent]
            pair.fresh = _with(pair.fresh, offset, offset + nbytes)
            return pair.places[1 - pair.committed] + offset

    def begin_draft(self, extent: int) -> bool:
        """Read the committed bytes until `end_draft`, whatever is written. Returns False if others are present."""
        with self._access:
            pair = self._pairs[extent]
            pair.drafted = not pair.fresh
            return pair.drafted

    def end_draft(self, extent: int, *, keep: bool) -> None:
        """End `begin_draft`. keep: the bytes written since are the present ones; else they are dropped."""
        with self._access:
            pair = self._pairs[extent]
            pair.drafted = False
            if not keep:
                pair.fresh = []

    @property
    def are_committed(self) -> bool:
        """Return whether the present bytes of all extents are the committed ones."""
        with self._access:
            return not any(pair.fresh for pair in self._pairs.values())

    def missing(self) -> list[tuple[Piece, int]]:
        """Return the committed pieces that the other slot of a partly written extent lacks, and where they belong."""
        found: list[tuple[Piece, int]] = []
        with self._access:
            for pair in self._pairs.values():
                if pair.is_whole:
                    continue
                old, new = pair.places[pair.committed], pair.places[1 - pair.committed]
                found += [
                    (piece, new + piece.start)
                    for piece in _pieces(pair, 0, pair.nbytes)
                    if old <= piece.offset < old + pair.nbytes
                ]
        return found

    def complete(self) -> None:
        """Note that the pieces of `missing` were copied, so that all extents are whole."""
        with self._access:
            for pair in self._pairs.values():
                if pair.fresh:
                    pair.fresh = [(0, pair.nbytes)]

    def seal(self) -> bytes:
        """Return the slot of each extent's present bytes, one byte an extent, which `commit` makes the committed ones.

        Every extent must be whole (`missing`).
        """
        with self._access:
            assert all(pair.is_whole for pair in self._pairs.values())
            return bytes(pair.present for pair in self._pairs.values())

    def places(self, sealed: bytes) -> list[tuple[int, int]]:
        """Return the place and the bytes of each extent in the slots of `seal`."""
        with self._access:
            return [(pair.places[slot], pair.nbytes) for pair, slot in zip(self._pairs.values(), sealed, strict=True)]

    def commit(self, sealed: bytes) -> None:
        """Make the slots of `seal` the committed ones. Bytes written since the last commit are dropped if they are in
        others.
        """
        with self._access:
            for pair, slot in zip(self._pairs.values(), sealed, strict=True):
                pair.committed, pair.fresh = slot, []


def _pieces(pair: _Pair, start: int, stop: int) -> list[Piece]:
    """Cut [start, stop) where the slot of the present bytes changes."""
    old, new = pair.places[pair.committed], pair.places[1 - pair.committed]
    found: list[Piece] = []
    position = start
    for first, last in pair.fresh:
        first, last = max(first, position), min(last, stop)
        if first >= last:
            continue
        if position < first:
            found.append(Piece(old + position, position - start, first - position))
        found.append(Piece(new + first, first - start, last - first))
        position = last
    if position < stop:
        found.append(Piece(old + position, position - start, stop - position))
    return found


def _with(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return sorted, disjoint ranges and [start, stop) together."""
    if start >= stop:
        return ranges
    apart = [each for each in ranges if each[1] < start or each[0] > stop]
    joined = [each for each in ranges if each not in apart]
    merged = (min([start, *(first for first, _ in joined)]), max([stop, *(last for _, last in joined)]))
    return sorted([*apart, merged])
