"""Second slots of extents, for updates that may be taken back."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.plan.placement import Extent


class Spares:
    """Places of extents that have two slots: one has the present bytes, the other is spare.

    Between `begin` and `end`, writes go to the spare slot and reads see the bytes of before. One thread at a time uses
    an extent; different extents may be used by different threads. Extents of a durable run have `Slots` instead, whose
    bytes become the present ones piece by piece, and the committed ones all at once.
    """

    def __init__(self, spares: Mapping[Extent, Extent]) -> None:
        """spares: extent → its second slot in the same tier."""
        self._slots = {first.offset: (first.offset, second.offset) for first, second in spares.items()}
        """Offset of an extent, by which it is named → places of the present and of the spare bytes."""
        self._drafts: set[int] = set()

    def is_drafted(self, extent: Extent) -> bool:
        """Return whether writes go to the spare slot."""
        return extent.offset in self._drafts

    def to_read(self, extent: Extent) -> int:
        """Return the place of the present bytes."""
        slots = self._slots.get(extent.offset)
        return extent.offset if slots is None else slots[0]

    def to_write(self, extent: Extent) -> int:
        """Return the place that a write changes."""
        slots = self._slots.get(extent.offset)
        return extent.offset if slots is None else slots[extent.offset in self._drafts]

    def begin(self, extent: Extent) -> bool:
        """Let writes go to the spare slot. Returns False if the extent has none."""
        if extent.offset not in self._slots:
            return False
        self._drafts.add(extent.offset)
        return True

    def end(self, extent: Extent, *, keep: bool) -> None:
        """End `begin`, once no write is under way. keep: make the written bytes, which are whole, the present ones."""
        self._drafts.discard(extent.offset)
        if keep:
            present, spare = self._slots[extent.offset]
            self._slots[extent.offset] = spare, present
