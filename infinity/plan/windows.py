"""Places of the records of whole parameters in the extents of their unit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from infinity.plan.formats import RECORD_ALIGNMENT
from infinity.plan.layout import UnitLayout

_WINDOW_ALIGNMENT = 64 << 10
"""Alignment in bytes of a window's records in their extent: the largest checksum block."""


@dataclass(frozen=True)
class RecordsFormat:
    """The records of a unit's parameters in the extent of each shard: window after window, parameter after parameter.

    Extents are equally long on all ranks.
    """

    layout: UnitLayout

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Byte of each window's records in the extent of its shard, and their bytes: none of them empty."""
        found: list[tuple[int, int]] = []
        offset = 0
        for window in self.layout.windows:
            if window.start % self.layout.shard_numel == 0:
                offset = 0
            records = [slot.record for slot in self.layout.slots[window.first : window.last]]
            nbytes = sum(record.nbytes for record in records if record is not None)
            nbytes = max(RECORD_ALIGNMENT, -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT)
            found.append((offset, nbytes))
            offset += -(-nbytes // _WINDOW_ALIGNMENT) * _WINDOW_ALIGNMENT
        return tuple(found)

    @cached_property
    def shard_nbytes(self) -> int:
        """Bytes of the extent of a shard."""
        return max(offset + nbytes for offset, nbytes in self.windows)

    @property
    def bytes_per_element(self) -> float:
        """Bytes of the records of an element of the shard, padding included."""
        return self.shard_nbytes / self.layout.shard_numel

    def step_nbytes(self, *, copied: bool) -> int:
        """Return the most bytes that the update of one parameter takes beside the buffers: the gradient in fp32, the
        class's own tensors, and the rounding of a master. copied: the values and the record too, for a device that
        cannot address their memory.
        """
        most = 0
        for slot in self.layout.slots:
            assert slot.record is not None
            values, has_master = 4 * slot.numel, slot.record.master is not None
            rounding = (6 if copied else 4) * slot.numel if has_master else 0
            copies = slot.record.nbytes + (0 if has_master else values) if copied else 0
            most = max(most, values + max(slot.record.step_nbytes, rounding) + copies)
        return most

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Byte of each slot's record in the extents of all shards, one after the other."""
        found: list[int] = []
        for window, (offset, _) in zip(self.layout.windows, self.windows, strict=True):
            first = window.start // self.layout.shard_numel * self.shard_nbytes + offset
            for slot in self.layout.slots[window.first : window.last]:
                assert slot.record is not None
                found.append(first)
                first += slot.record.nbytes
        return tuple(found)

    def of(self, records: torch.Tensor, slot: int) -> torch.Tensor:
        """Return the record of a slot in those of all shards, uint8 (shards × shard_nbytes,)."""
        record = self.layout.slots[slot].record
        assert record is not None
        return records[self.places[slot] : self.places[slot] + record.nbytes]

    def masters(self, records: torch.Tensor, shard: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the place of each parameter in a shard, in elements, and its fp32 master in the shard's records.

        records: uint8 (shard_nbytes,), of a unit in 16 bits.
        """
        low, high = self.layout.shard_range(shard)
        for window in self.layout.windows:
            for number in range(window.first, window.last) if low <= window.start < high else ():
                slot, place = self.layout.slots[number], self.places[number] - shard * self.shard_nbytes
                assert slot.record is not None and slot.record.master is not None
                master = slot.record.master.of(records[place : place + slot.record.nbytes])
                yield slice(slot.offset - low, slot.stop - low), master
