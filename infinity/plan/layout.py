"""Layout of parameters in a unit's flat tensor, and of the flat tensor in shards. Pure functions, no allocation.

A unit is one contiguous, padded flat tensor of one dtype. Rank `r` of `world_size` owns the shard
`flat[r * shard_numel : (r + 1) * shard_numel]`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch

from infinity.plan.frozen import FrozenCode
from infinity.plan.records import Record


@dataclass(frozen=True)
class Member:
    """One parameter of a unit."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's part, if tensor parallelism divides the parameter."""
    group: int = -1
    """Index of its param_group; -1: not trained."""
    copies: int = 1
    """Number of tensor-parallel ranks that hold the same values."""
    record: Record | None = None
    """Its optimizer states if a rule in Python updates it as a whole; None: a native rule updates its elements."""


@dataclass(frozen=True)
class DiscoveredUnit:
    """Parameters of one dtype, all trainable or all frozen, all with records or all without. keeps: they have this
    dtype in every engine.
    """

    name: str
    dtype: torch.dtype
    trainable: bool
    members: tuple[Member, ...]
    coded: bool = False
    """Frozen parameters that `infinity.frozen` may store in a code."""
    keeps: bool = False


@dataclass(frozen=True)
class Discovered:
    """All units of a model, in the order of the module tree."""

    units: tuple[DiscoveredUnit, ...]
    held_together: frozenset[frozenset[int]] = field(default_factory=frozenset)
    """Sets of units (indices) that nested modules hold at once."""
    blocks: frozenset[frozenset[int]] = field(default_factory=frozenset)
    """Units (indices) of each repeated block that contains no other."""

    def without(self, units: Collection[int]) -> Discovered:
        """Return the model without these units (indices); the others are numbered anew."""
        numbers = {unit: number for number, unit in enumerate(i for i in range(len(self.units)) if i not in units)}

        def kept(sets: frozenset[frozenset[int]]) -> frozenset[frozenset[int]]:
            found = (frozenset(numbers[unit] for unit in each if unit in numbers) for each in sets)
            return frozenset(each for each in found if each)

        return Discovered(tuple(self.units[unit] for unit in numbers), kept(self.held_together), kept(self.blocks))


# Every parameter starts at a block of 8-bit moments, which share a scale (`infinity.optim.moments.BLOCK`).
SLOT_ALIGNMENT = 256
# A shard of any state (2 or 4 bytes an element) is then a whole number of 4096-byte disk blocks.
SHARD_ALIGNMENT = 2048
# Ranges of a shard in a tier begin at multiples of 64 KiB, the largest checksum block, in every dtype.
_WINDOW_ALIGNMENT = 32768
_SMALL_WINDOW = 65536
"""Elements up to which whole parameters share a window: each takes a read and a write of its own."""


NormOf = Literal["model", "optimizer"]


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat tensor: `flat[offset : offset + numel].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    copies: int = 1
    """Number of tensor-parallel ranks that hold the same values: 1 unless the parameter is replicated."""
    in_norm: bool = True
    """Its gradient counts in the norm of all gradients."""
    record: Record | None = None
    """Its optimizer states if a rule in Python updates it as a whole."""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel


class Part(NamedTuple):
    """Range of a shard that belongs to one parameter, `shard[start:stop]`."""

    start: int
    stop: int
    copies: int = 1
    in_norm: bool = True


class Window(NamedTuple):
    """A range `flat[start:stop]` within one shard, and its whole parameters `slots[first:last]`."""

    start: int
    stop: int
    first: int
    last: int


class Run(NamedTuple):
    """A range of a shard, `shard[start:stop]`, whose elements share the hyper-parameters of one param_group.

    step: number of the present update of these elements, from 1.
    """

    start: int
    stop: int
    group: int
    step: int


@dataclass(frozen=True)
class UnitLayout:
    """Flat tensor of one unit: its slots in order, its padded length `numel` and its shards over `world_size` ranks."""

    index: int
    name: str
    slots: tuple[Slot, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    world_size: int
    first: int = 0
    """Index of the flat tensor's first element in the model: independent of ranks, a multiple of `SLOT_ALIGNMENT`."""
    windows: tuple[Window, ...] = ()
    """The ranges in which rules in Python update whole parameters: of the first shard, of the second, …; at least one
    of each. () if native rules update elements, whose tiles may begin anywhere."""
    code: FrozenCode | None = None
    """Code in which the tier stores the parameters; None: they are stored as they are."""

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
    def stored_nbytes(self) -> int:
        """Return the bytes of a shard of the parameters in its tier."""
        return self.shard_nbytes if self.code is None else self.code.nbytes(self.shard_numel)

    @property
    def end(self) -> int:
        """Index in the model at which the next unit begins: independent of ranks."""
        return self.first + sum(round_up(slot.numel, SLOT_ALIGNMENT) for slot in self.slots)

    @property
    def parameter_numel(self) -> int:
        """Number of elements that belong to parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def shard_of(self, memory: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the shard of `rank` in the unit's bytes: uint8 (shard_nbytes,)."""
        return memory[rank * self.shard_nbytes : (rank + 1) * self.shard_nbytes]

    def runs(self, rank: int, steps: Mapping[int, int]) -> list[Run]:
        """Return the updated ranges of `rank`'s shard, cut where the param_group or the number of the update changes.

        steps: slot with a gradient → number of its updates, the present one included. Padding belongs to the run
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
        """Return each slot's part of `rank`'s shard, in order. Slots without a part are left out."""
        if rank not in self._parts:
            low, high = self.shard_range(rank)
            found = (
                Part(max(slot.offset, low) - low, min(slot.stop, high) - low, slot.copies, slot.in_norm)
                for slot in self.slots
            )
            self._parts[rank] = [part for part in found if part.start < part.stop]
        return self._parts[rank]

    @cached_property
    def _parts(self) -> dict[int, list[Part]]:
        return {}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the flat tensor that belong to no parameter."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def slots_in(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (slot, start, stop) for each slot with elements in `flat[start:stop]`, and their range there."""
        for number in range(self.slot_at(start), len(self.slots)):
            slot = self.slots[number]
            if slot.offset >= stop:
                return
            if max(start, slot.offset) < min(stop, slot.stop):
                yield number, max(start, slot.offset), min(stop, slot.stop)

    def slot_at(self, offset: int) -> int:
        """Return the index of the slot at element `offset` of the flat tensor; in padding, of the slot before."""
        return max(0, bisect_right(self._offsets, offset) - 1)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(slot.offset for slot in self.slots)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout_unit(
    index: int,
    name: str,
    members: Sequence[Member],
    dtype: torch.dtype,
    trainable: bool,
    world_size: int,
    first: int = 0,
    *,
    norm_of: NormOf = "model",
    code: FrozenCode | None = None,
) -> UnitLayout:
    """Lay out `members` in order of param_group, so that a shard has few runs.

    first: `end` of the previous unit. norm_of: "optimizer" leaves members of no group out of the gradient norm. code:
    as of `UnitLayout`.
    """
    if any(member.record is not None for member in members):
        return _layout_whole(index, name, members, dtype, world_size, first, norm_of)
    slots = []
    offset = 0
    for member in sorted(members, key=lambda member: member.group):
        in_norm = norm_of == "model" or member.group >= 0
        slots.append(Slot(member.name, member.shape, offset, member.group, member.copies, in_norm))
        offset = round_up(offset + prod(member.shape), SLOT_ALIGNMENT)
    numel = round_up(max(offset, 1), SHARD_ALIGNMENT * world_size)
    return UnitLayout(index, name, tuple(slots), dtype, trainable, numel, world_size, first, code=code)


def _layout_whole(
    index: int, name: str, members: Sequence[Member], dtype: torch.dtype, world_size: int, first: int, norm_of: NormOf
) -> UnitLayout:
    """Lay out `members` so that no shard boundary cuts one, with shards as equal as the largest parameters allow.

    Members go to the shard with the fewest elements, the largest first (Graham 1969). Shards have equal lengths, so
    those with fewer elements end in padding.
    """
    shards: list[list[Member]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for member in sorted(members, key=lambda member: -prod(member.shape)):
        least = loads.index(min(loads))
        shards[least].append(member)
        loads[least] += _room_of(member)
    position = {member.name: number for number, member in enumerate(members)}
    cut = [_windows(sorted(shard, key=lambda member: position[member.name])) for shard in shards]
    length = round_up(max(end for _, end in cut), SHARD_ALIGNMENT)
    slots: list[Slot] = []
    windows: list[Window] = []
    for number, (starts, _) in enumerate(cut):
        low = number * length
        stops = [low + start for start, _ in starts[1:]] + [low + length]
        for (start, held), stop in zip(starts, stops, strict=True):
            before, offset = len(slots), low + start
            for member in held:
                in_norm = norm_of == "model" or member.group >= 0
                record = member.record
                slots.append(Slot(member.name, member.shape, offset, member.group, member.copies, in_norm, record))
                offset += _room_of(member)
            windows.append(Window(low + start, stop, before, len(slots)))
    numel = length * world_size
    return UnitLayout(index, name, tuple(slots), dtype, True, numel, world_size, first, tuple(windows))


def _room_of(member: Member) -> int:
    """Return the elements between a whole parameter and the next one: some for an empty one, which has a record too."""
    return round_up(max(prod(member.shape), 1), SLOT_ALIGNMENT)


def _windows(members: Sequence[Member]) -> tuple[list[tuple[int, list[Member]]], int]:
    """Return (start, members) of each window of a shard, and the element at which the last one ends."""
    found: list[tuple[int, list[Member]]] = [(0, [])]
    end = 0
    for member in members:
        numel = _room_of(member)
        start, held = found[-1]
        if held and end + numel - start > _SMALL_WINDOW:
            end = round_up(end, _WINDOW_ALIGNMENT)
            found.append((end, held := []))
        held.append(member)
        end += numel
    return found, max(end, 1)
