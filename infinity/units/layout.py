"""Where each parameter lies in its unit's flat tensor, and each unit in its shards. Pure functions, no allocation.

A unit is one contiguous, padded flat tensor of one dtype. Rank `r` of `world_size` owns the shard
`flat[r * shard_numel : (r + 1) * shard_numel]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

# Every parameter starts with a block of 8-bit moments, which share a scale (`infinity.optim.moments.BLOCK`).
SLOT_ALIGNMENT = 256
# A shard of any state (2 or 4 bytes an element) is then a whole number of 4096-byte disk blocks.
SHARD_ALIGNMENT = 2048


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat tensor: `flat[offset : offset + numel].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    copies: int = 1
    """Ranks that hold the same values beside the data-parallel ones: 1, but for what tensor parallelism repeats."""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel


class Part(NamedTuple):
    """What a shard has of one parameter, `shard[start:stop]`."""

    start: int
    stop: int
    copies: int = 1


@dataclass(frozen=True)
class Run:
    """A range of a shard, `shard[start:stop]`, whose elements share the hyper-parameters of one param_group.

    step: number of this update of them, from 1.
    """

    start: int
    stop: int
    group: int
    step: int


@dataclass(frozen=True)
class UnitLayout:
    """The flat tensor of one unit: its slots in order, its padded length and its division over ranks."""

    index: int
    name: str
    slots: tuple[Slot, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    world_size: int
    first: int = 0
    """Number of the flat tensor's first element in the model, which does not depend on the ranks; a multiple of
    `SLOT_ALIGNMENT`."""

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def shard_nbytes(self) -> int:
        return self.nbytes // self.world_size

    @property
    def end(self) -> int:
        """Number of the element after the last parameter's, rounded up: where the next unit begins."""
        return self.first + round_up(self.slots[-1].stop if self.slots else 0, SLOT_ALIGNMENT)

    @property
    def parameter_numel(self) -> int:
        """Elements that belong to parameters, padding left out."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def runs(self, rank: int, steps: Mapping[int, int]) -> list[Run]:
        """The part of `rank`'s shard that is updated, cut where the param_group or the number of the update changes.

        steps: slot that has a gradient → how often it has been updated, this time included. Padding belongs to the run
        before it; slots of no group (-1) are left out.
        """
        low, high = self.shard_range(rank)
        found: list[list[int]] = []  # the fields of each Run; there may be many slots but few runs
        last = [-1, -1, -1, -1]
        ends = [slot.offset for slot in self.slots[1:]] + [self.numel]
        for number, (slot, end) in enumerate(zip(self.slots, ends, strict=True)):
            start, stop = max(slot.offset, low), min(end, high)
            if start >= stop or slot.group < 0 or number not in steps:
                continue
            step = steps[number]
            if last[1:] == [start - low, slot.group, step]:
                last[1] = stop - low
            else:
                last = [start - low, stop - low, slot.group, step]
                found.append(last)
        return [Run(*fields) for fields in found]

    def parts(self, rank: int) -> list[Part]:
        """The part of `rank`'s shard that each slot has, in order; slots without one are left out."""
        if rank not in self._parts:
            self._parts[rank] = self._parts_of(rank)
        return self._parts[rank]

    @cached_property
    def _parts(self) -> dict[int, list[Part]]:
        return {}

    def _parts_of(self, rank: int) -> list[Part]:
        low, high = self.shard_range(rank)
        found = (Part(max(slot.offset, low) - low, min(slot.stop, high) - low, slot.copies) for slot in self.slots)
        return [part for part in found if part.start < part.stop]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the flat tensor that belong to no parameter."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def slot_at(self, offset: int) -> int:
        """Index of the slot that holds element `offset` of the flat tensor (the slot before it, in padding)."""
        low, high = 0, len(self.slots) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.slots[middle].offset <= offset:
                low = middle
            else:
                high = middle - 1
        return low


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout_unit(
    index: int,
    name: str,
    members: Sequence[tuple[str, tuple[int, ...], int]],
    dtype: torch.dtype,
    trainable: bool,
    world_size: int,
    first: int = 0,
) -> UnitLayout:
    """Lay out `members`, (name, shape, param_group) each, in order of param_group so that a shard has few runs.

    first: the end of the unit before.
    """
    slots = []
    offset = 0
    for member, shape, group in sorted(members, key=lambda entry: entry[2]):
        slots.append(Slot(member, shape, offset, group))
        offset = round_up(offset + prod(shape), SLOT_ALIGNMENT)
    numel = round_up(max(offset, 1), SHARD_ALIGNMENT * world_size)
    return UnitLayout(index, name, tuple(slots), dtype, trainable, numel, world_size, first)
