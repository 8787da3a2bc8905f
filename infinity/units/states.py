"""Reads and writes the states of one unit as flat tensors on the host, over the tiers of all ranks: whole, or in ranges
of each shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, tee

import torch

from infinity.comm.communicator import Communicator
from infinity.comm.side import SideChannel
from infinity.optim.cpu_adam import join_master, split_master
from infinity.optim.parameter_rule import round_master
from infinity.plan.formats import StateFormat, StateKind
from infinity.plan.layout import Slot, UnitLayout
from infinity.plan.placement import Extent, Placement, State, tiles
from infinity.plan.windows import RecordsFormat
from infinity.tier_kind import TierKind
from infinity.tiers import frozen
from infinity.tiers.base import Tier
from infinity.tiers.device import Device
from infinity.tiers.memory import PAGE, host_tensor, with_own_storage
from infinity.tiers.transfer import Transfer
from infinity.units.coded import encode, encode_edit
from infinity.units.records import Records

RECORDS = "records"
Flats = dict[str, torch.Tensor]
"""State name → flat tensor: `master` (numel,) in fp32 and moments in the unit's format (`infinity.plan.formats`), or
`param` (numel,) in the unit's dtype. Of rules in Python: `records`, uint8, those of all shards, with the masters of
16-bit parameters.
"""


def flat_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed, page-aligned host tensor (numel,)."""
    return host_tensor(numel * dtype.itemsize).view(dtype)


@dataclass(frozen=True)
class UnitStates:
    """Reads and writes states outside of training (construction, checkpoints). The unit must have no I/O in flight."""

    placement: Placement
    tiers: Mapping[TierKind, Tier]
    formats: Callable[[UnitLayout], StateFormat | RecordsFormat]
    ranks: Communicator | SideChannel
    device: Device

    def write(self, layout: UnitLayout, flats: Flats, *, edits: bool = False) -> None:
        """Write this rank's shards. A trained unit needs `master`; moments left out are zero. A frozen one needs
        `param`, whose values are rounded to those of its code.

        edits: raise UsageError for frozen parameters that would be rounded. Raises ModelError if one of them has a code
        and is not finite.
        """
        if layout.windows:
            param, records = self._whole(layout, flats)
            self._write_param(layout, param)
            tier, extent = self._at(layout, State.OPTIM)
            tier.write(extent, records).wait()
            return
        shards = {name: self.ranks.shard(flat) for name, flat in flats.items()}
        self.write_range(layout, 0, layout.shard_numel, shards, edits=edits)

    def write_range(
        self, layout: UnitLayout, start: int, stop: int, values: Mapping[str, torch.Tensor], *, edits: bool = False
    ) -> None:
        """Write elements [start, stop) of this rank's shard, one of `ranges`. values: state → the shard's values of
        these elements. Otherwise as `write`.
        """
        if not layout.trainable:
            if layout.code is not None:
                encoded = encode(layout, layout.code, values["param"], self.ranks.shard_rank, edited=edits)
                self._write_stored(layout, encoded).wait()
            else:
                self._write_param(layout, values["param"], start)
            return
        param, states = values["master"], dict(values)
        # The fp32 master is the parameter plus a remainder of 16 bits [Note: a master in 16 bits].
        if layout.dtype == torch.bfloat16:
            halves = [flat_tensor(stop - start, dtype) for dtype in (layout.dtype, torch.int16)]
            param, states["remainder"] = halves
            split_master(values["master"], (param, states["remainder"]))
        self._write_param(layout, param, start)
        self._records(layout).write(states, start, stop)

    def _whole(self, layout: UnitLayout, flats: Flats) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard of the parameters and of the records. Records left out are zero."""
        form, rank = RecordsFormat(layout), self.ranks.shard_rank
        records = self.ranks.shard(flats[RECORDS]) if RECORDS in flats else host_tensor(form.shard_nbytes)
        if layout.dtype == torch.float32:
            return self.ranks.shard(flats["master"]), records
        # Construction and loads give masters alone; the parameter is rounded from them, as in an update.
        param = flat_tensor(layout.shard_numel, layout.dtype)
        values = self.ranks.shard(flats["master"]) if "master" in flats else None
        for part, master in form.masters(records, rank):
            if values is not None:
                master.copy_(values[part].view(master.shape))
            round_master(master, param[part].view(master.shape))
        return param, records

    def read(self, layout: UnitLayout) -> Flats:
        """Return the unit's states, complete on every rank. Collective."""
        flats = self.read_shards(layout)
        self.complete(flats)
        return flats

    def read_shards(self, layout: UnitLayout) -> Flats:
        """Return the unit's states with only this rank's shards filled in."""
        if not layout.windows:
            return self.read_range(layout, 0, layout.shard_numel)
        # One read of the whole extent: windows have their gaps there too, and a save needs all of them.
        form = RecordsFormat(layout)
        flats = {RECORDS: host_tensor(form.shard_nbytes * layout.world_size)}
        tier, extent = self._at(layout, State.OPTIM)
        tier.read(extent, self.ranks.shard(flats[RECORDS])).wait()
        if layout.dtype == torch.float32:
            flats["master"] = self._read_shard(layout)
        return flats

    def ranges(self, layout: UnitLayout) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of a shard's elements that `read_range` and `write_range` take, in order."""
        return self.placement.ranges(layout)

    def read_range(self, layout: UnitLayout, start: int, stop: int) -> Flats:
        """Return elements [start, stop) of all shards, one of `ranges`, with only this rank's filled in.

        Tensors are flat, with the values of the first shard, of the second, …
        """
        flats = self.zeros(layout, (stop - start) * layout.world_size)
        self._fill(layout, start, stop, {name: self.ranks.shard(flat) for name, flat in flats.items()})
        return flats

    def read_own(self, layout: UnitLayout, start: int, stop: int) -> Flats:
        """Return elements [start, stop) of this rank's shard, one of `ranges`, as `write_range` takes them."""
        values = self.zeros(layout, stop - start)
        self._fill(layout, start, stop, values)
        return values

    def zeros(self, layout: UnitLayout, numel: int) -> Flats:
        """Return zeros for the states of `numel` elements, a multiple of `SLOT_ALIGNMENT`."""
        return {kind.name: flat_tensor(kind.length(numel), kind.dtype) for kind in self.kinds(layout)}

    def _fill(self, layout: UnitLayout, start: int, stop: int, values: Flats) -> None:
        """Read elements [start, stop) of this rank's shard into `values`, which has the states of `kinds`."""
        if not layout.trainable:
            self._read_param(layout, values["param"], start)
            return
        states, names = dict(values), {kind.name for kind in self._native(layout).states}
        # An fp32 parameter is its own master, and is stored once.
        if layout.dtype == torch.float32:
            self._read_param(layout, states.pop("master"), start)
        # Masters are joined before they are sent, so that rank 0 needs no halves of the others.
        if "remainder" in names:
            states["remainder"] = flat_tensor(stop - start, torch.int16)
        self._records(layout).read(states, start, stop)
        if "remainder" in names:
            param = flat_tensor(stop - start, layout.dtype)
            self._read_param(layout, param, start)
            join_master(param, states["remainder"], out=values["master"])

    def complete(self, flats: Flats) -> None:
        """Fill in the other ranks' shards. Collective. A `SideChannel` fills them in on rank 0 only."""
        for flat in flats.values():
            self.ranks.complete(flat.view(torch.uint8))  # as bytes: not every backend supports every dtype

    def read_param(self, layout: UnitLayout) -> torch.Tensor:
        """Return the unit's parameters (numel,) in its dtype, complete on every rank. Collective."""
        flat = self._read_shard(layout)
        self.ranks.complete(flat.view(torch.uint8))
        return flat

    def _read_shard(self, layout: UnitLayout) -> torch.Tensor:
        """Return (numel,) in the unit's dtype with only this rank's shard of the parameters filled in."""
        flat = flat_tensor(layout.numel, layout.dtype)
        self._read_param(layout, self.ranks.shard(flat))
        return flat

    def _read_param(self, layout: UnitLayout, values: torch.Tensor, start: int = 0) -> None:
        """Fill `values`, in the unit's dtype, with elements of this rank's shard of the parameters from `start` on; of
        those with a code, all.
        """
        memory = values.view(torch.uint8)
        tier, extent = self._at(layout, State.PARAM)
        if extent.code is None:
            tier.read(extent, memory, start * layout.dtype.itemsize).wait()
            return
        stored = extent.code.stored_in(memory)
        tier.read(extent, stored).wait()
        frozen.decode(extent.code, stored, memory)

    def kinds(self, layout: UnitLayout, slot: int = 0, updates: int = 0) -> tuple[StateKind, ...]:
        """Return the states of a parameter that `write` takes and `read` returns. updates: number of them so far, on
        which the states of rules in Python depend.
        """
        if not layout.trainable:
            return (StateKind("param", layout.dtype),)
        if (record := layout.slots[slot].record) is not None:
            return record.kinds(updates)
        moments = (k for k in self._native(layout).states if k.name not in ("remainder", "master"))
        return (StateKind("master", torch.float32), *moments)

    def empty(self, layout: UnitLayout) -> Flats:
        """Return zeros for all states of a unit, as `write` takes them."""
        if layout.windows:
            flats = {RECORDS: host_tensor(RecordsFormat(layout).shard_nbytes * layout.world_size)}
            if layout.dtype == torch.float32:
                flats["master"] = flat_tensor(layout.numel, torch.float32)
            return flats
        return self.zeros(layout, layout.numel)

    def of_slot(self, layout: UnitLayout, flats: Flats, slot: int, updates: int) -> Flats:
        """Return views of a parameter's states, by name, in their saved shapes. `kinds` gives their order."""
        place, kinds = layout.slots[slot], self.kinds(layout, slot, updates)
        if place.record is None:
            return {kind.name: view(kind, place, flats[kind.name]) for kind in kinds}
        memory = RecordsFormat(layout).of(flats[RECORDS], slot)
        master = place.record.master
        values = flats["master"][place.offset : place.stop].view(place.shape) if master is None else master.of(memory)
        return {"master": values, **{field.name: field.of(memory) for field in place.record.states(updates).fields}}

    def fetch(self, layout: UnitLayout, shard: torch.Tensor) -> Transfer:
        """Start reading this rank's shard of the parameters into `shard`, uint8 (shard_nbytes,). See `Tier.fetch`."""
        tier, extent = self._at(layout, State.PARAM)
        return tier.fetch(extent, shard)

    def in_place(self, layout: UnitLayout) -> torch.Tensor:
        """Return the parameters' extent in host memory, uint8 (shard_nbytes,), as a tensor that owns its storage."""
        tier, extent = self._at(layout, State.PARAM)
        memory = tier.memory(extent)
        assert memory is not None
        return with_own_storage(memory)

    @cached_property
    def reads_ahead(self) -> Sequence[TierKind]:
        """Tiers of parameters whose `read_ahead` begins reads."""
        return [kind for kind in sorted(self.placement.tiers(State.PARAM)) if self.tiers[kind].reads_ahead]

    def read_ahead(self, layouts: Iterable[UnitLayout]) -> None:
        """Start reading this rank's shards of the parameters, in this order, before `fetch`, as far as tiers can.

        Takes as many of `layouts` as tiers have buffers for.
        """
        kinds = self.reads_ahead
        for kind, same in zip(kinds, tee(layouts, len(kinds)), strict=True):
            extents = (self.placement.of(layout.index, State.PARAM) for layout in same)
            of_tier = (extent for extent in extents if extent.tier is kind)
            nearest = next(of_tier, None)
            if nearest is not None:
                self.tiers[kind].read_ahead(chain((nearest,), of_tier))

    def write_back(self, layout: UnitLayout, shard: torch.Tensor) -> Transfer:
        """Start writing this rank's shard of the parameters, uint8 (shard_nbytes,), to its tier.

        Raises UsageError if it has a code, which would round the values.
        """
        if layout.code is None:
            return self._write_stored(layout, shard)
        encoded = encode_edit(layout, layout.code, shard, self.ranks.shard_rank, self.device)
        return self._write_stored(layout, encoded)

    def check_code(self, layout: UnitLayout, flat: torch.Tensor) -> None:
        """Raise UsageError if the code of a frozen unit would round one of its values. flat: (numel,) on the device."""
        assert layout.code is not None
        encode_edit(layout, layout.code, flat.view(torch.uint8), 0, self.device)

    def _write_stored(self, layout: UnitLayout, stored: torch.Tensor, offset: int = 0) -> Transfer:
        tier, extent = self._at(layout, State.PARAM)
        return tier.write(extent, stored, offset)

    def sync_masters_from_edit(self, layout: UnitLayout, shard: torch.Tensor) -> None:
        """Set the masters of 16-bit parameters that were edited to the edited values.

        shard: this rank's part of the unit's buffer, uint8 (shard_nbytes,).

        Call it before the edit is written back: edited elements are found by comparison with the tier.
        """
        if not layout.trainable or layout.dtype == torch.float32:
            return
        # Only edited elements change: the remainder of the others has bits that the parameter lacks.
        before, after = flat_tensor(layout.shard_numel, layout.dtype), flat_tensor(layout.shard_numel, layout.dtype)
        tier, extent = self._at(layout, State.PARAM)
        tier.read(extent, before.view(torch.uint8)).wait()
        self.device.copy(after.view(torch.uint8), shard).wait()
        changed = before.view(torch.int16) != after.view(torch.int16)
        if layout.windows:
            self._sync_whole(layout, changed, after)
        else:
            self._records(layout).sync_masters(changed, after)

    def _sync_whole(self, layout: UnitLayout, changed: torch.Tensor, values: torch.Tensor) -> None:
        """Set the masters of `changed` elements of this rank's shard to `values`."""
        form, rank = RecordsFormat(layout), self.ranks.shard_rank
        tier, extent = self._at(layout, State.OPTIM)
        records = host_tensor(form.shard_nbytes)
        tier.read(extent, records).wait()
        for part, master in form.masters(records, rank):
            master.view(-1)[changed[part]] = values[part][changed[part]].float()
        tier.write(extent, records).wait()

    def _native(self, layout: UnitLayout) -> StateFormat:
        states = self.formats(layout)
        assert isinstance(states, StateFormat)
        return states

    def _records(self, layout: UnitLayout) -> Records:
        states = self._native(layout)
        cut = tiles(layout.shard_numel, self.placement.tile_sizes[layout.index], states)
        return Records(*self._at(layout, State.OPTIM), states, cut)

    def _write_param(self, layout: UnitLayout, shard: torch.Tensor, start: int = 0) -> None:
        """Write elements of this rank's shard of the parameters from `start` on, in the unit's dtype or fp32."""
        aligned = shard
        # Direct I/O needs aligned memory, and a shard begins anywhere in the flat tensor.
        if shard.dtype != layout.dtype or shard.data_ptr() % PAGE:
            aligned = flat_tensor(shard.numel(), layout.dtype)
            aligned.copy_(shard)
        self._write_stored(layout, aligned.view(torch.uint8), start * layout.dtype.itemsize).wait()

    def _at(self, layout: UnitLayout, state: State) -> tuple[Tier, Extent]:
        extent = self.placement.of(layout.index, state)
        return self.tiers[extent.tier], extent


def view(kind: StateKind, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's part of the unit's flat tensor, in its saved shape."""
    return flat[kind.part(slot.offset, slot.stop)].view(kind.shape_in(slot.shape))
