"""Reads the files of states of a durable run's ranks, without the engine that wrote them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from infinity.checkpoint.tensors import PART
from infinity.errors import CheckpointError, ChecksumError
from infinity.native import _aio
from infinity.optim.cpu_adam import join_master
from infinity.plan.formats import MasterFormat, StateFormat, StateKind, state_format
from infinity.plan.io import LARGEST_CHUNK, SMALLEST_CHUNK, Stripe
from infinity.plan.layout import SLOT_ALIGNMENT, Slot, UnitLayout, Window
from infinity.plan.placement import CALLED, State
from infinity.plan.records import Field, Record, States
from infinity.plan.windows import RecordsFormat
from infinity.rules import MomentFormat, RuleName
from infinity.tiers.digests import PART as PART_READ, Digests, Read, digest_of
from infinity.tiers.files import alignment, open_direct
from infinity.tiers.io import open_engine
from infinity.tiers.memory import host_tensor

_MASTERS: tuple[MasterFormat, ...] = ("remainder", "fp32")
_LONGEST_STRIPE = 4096
"""Chunks that the native engine accepts."""
_VERIFIED = 8 << 20
"""Bytes that are compared with checksums at once, a multiple of any block."""


@dataclass(frozen=True)
class Stored:
    """Format of one extent of a unit, and the elements of its tiles."""

    form: StateFormat
    tile: int
    whole: int = 0
    """Bytes of the extent if it is not cut in tiles: parameters, or records of rules in Python; 0: it is."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the extent for a shard of `numel` elements."""
        if self.whole:
            return self.whole
        full, rest = divmod(numel, self.tile)
        return full * self.form.nbytes(self.tile) + self.form.nbytes(rest)


@dataclass(frozen=True)
class SavedUnit:
    """A unit of the run that wrote the files."""

    layout: UnitLayout
    stored: Mapping[State, Stored]
    """A frozen unit has no optimizer states."""

    @cached_property
    def kinds(self) -> Mapping[str, tuple[State, StateKind]]:
        """Name of a state → the extent that holds it, and its format."""
        return {kind.name: (state, kind) for state, stored in self.stored.items() for kind in stored.form.states}

    def ranges(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, byte in its extent, bytes) for the values of elements [start, stop) of a state, in order."""
        state, kind = self.kinds[name]
        stored = self.stored[state]
        length = self.layout.shard_numel
        while start < stop:
            shard, inside = divmod(start, length)
            number, within = divmod(inside, stored.tile)
            numel = min(stored.tile, length - number * stored.tile)
            count = min(stop - start, numel - within)
            values = kind.part(within, within + count)
            place = stored.form.ranges(numel)[name]
            offset = number * stored.form.nbytes(stored.tile) + place.first
            width = kind.dtype.itemsize
            yield shard, offset + values.start * width, (values.stop - values.start) * width
            start += count


class RankStates:
    """The states of one rank: its units, and bytes of their extents."""

    def __init__(
        self,
        paths: Sequence[Path],
        layout: Mapping[str, Any],
        slots: bytes,
        checksums: bytes = b"",
        digests: Digests | None = None,
    ) -> None:
        """paths: the file in each folder. layout: as of a manifest (`infinity.durable.manifest`). slots: the slot of
        each extent. checksums: of the blocks of the file; empty if none are kept. digests: of the extents; None if
        they are not known.

        Raises CheckpointError if a file is missing or shorter than the layout says, or if the layout contradicts itself
        or the slots.
        """
        self._paths, self.layout = list(paths), layout
        self.path = paths[0]
        """The first file, for messages."""
        with well_formed(paths[0]):
            self.units = [_unit(number, unit, layout["shards"]) for number, unit in enumerate(layout["units"])]
            self._stripe, nbytes = stripe_of(layout), int(layout["nbytes"])
            chunk = self._stripe.chunk
            _require(SMALLEST_CHUNK <= chunk <= LARGEST_CHUNK and 0 < nbytes < 1 << 60, "the bytes of the file")
            _require(len(layout["extents"]) == len(slots), "the number of extents")
            self._block, self._checksums, self._digests = int(layout["checksum_block"]), checksums, digests
            _require(digests is None or len(digests) == len(slots), "the number of digests")
            _require(digests is None or (0 < digests.block <= PART_READ and not digests.block % 4096), "the blocks")
            covered = len(self._checksums) // 4 * self._block
            _require(not self._checksums or nbytes <= covered < nbytes + LARGEST_CHUNK * len(paths), "the checksums")
            _require(all(type(n) is int for u, _, *numbers in layout["extents"] for n in (u, *numbers)), "the extents")
            self.places: Mapping[tuple[int, State], tuple[int, int]] = {
                (unit, State(state)): ((first, second)[slot], length)
                for (unit, state, first, second, length), slot in zip(layout["extents"], slots, strict=True)
            }
            """Unit and state → byte of its extent, and its bytes."""
            for unit in self.units:
                for state, stored in unit.stored.items():
                    offset, length = self.places[unit.layout.index, state]
                    _require(length == stored.nbytes(unit.layout.shard_numel), "the bytes of a unit")
                    _require(0 <= offset <= nbytes - length, "the place of a unit")
        if layout["folders"] != len(paths):
            raise CheckpointError(
                f"{paths[0].parent.parent} is striped over {layout['folders']} folders, and {len(paths)} are named: "
                "name the folders of the run in nvme_path, in their order, of an engine with infinity.durable"
            )
        for path, size in zip(paths, file_sizes(layout), strict=True):
            with ExitStack() as stack:
                present = os.fstat(_opened(path, stack)).st_size
            if present < size:
                raise CheckpointError(
                    f"{path} has {present:,} bytes instead of {size:,}: it was cut short. Restore it, or use a "
                    "checkpoint"
                )

    def opened(self, stack: ExitStack) -> list[int]:
        """Return a descriptor of each file, until the end of `stack`. Raises CheckpointError if one is missing."""
        return [_opened(path, stack) for path in self._paths]

    def ranges(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, byte in it, bytes) for bytes [start, start + nbytes), in order."""
        return self._stripe.pieces(start, nbytes)

    def verify(self) -> None:
        """Read the states and compare their digests, if there are any. Raises CheckpointError."""
        if wrong := self.wrong():
            raise CheckpointError(
                f"{self.path} does not hold the states of its commit: the {wrong} differ from those that were "
                "committed. The files were copied while the run trained, were altered since, or the drive is failing. "
                "Copy them again while no process trains the run, use a checkpoint, or pass verify=False to load "
                "them at your own risk."
            )

    def wrong(self) -> str:
        """Read the states, and name the first extent that differs from its digest; empty if none does.

        Raises CheckpointError if they cannot be read.
        """
        if self._digests is None:
            return ""
        with ExitStack() as stack:
            read = self._reader(stack)
            for number, ((unit, state), (place, nbytes)) in enumerate(self.places.items()):
                try:
                    found = digest_of(read, place, nbytes, self._digests.block)
                except OSError as error:
                    raise CheckpointError(
                        f"{error.filename} cannot be read ({error.strerror}): check its drive, or use a checkpoint"
                    ) from error
                if found != self._digests[number]:
                    return f"{CALLED[state]} of unit {self.units[unit].layout.name}"
        return ""

    def _reader(self, stack: ExitStack) -> Read:
        """Return a function that reads bytes of the file past the page cache where the file system allows that."""
        members = []
        for path, fd in zip(self._paths, self.opened(stack), strict=True):
            direct = open_direct(fd, os.O_RDONLY)
            if direct >= 0:
                stack.callback(os.close, direct)
            members.append(_aio.File(direct, fd, str(path), alignment()))
        file = self._whole(members)
        engine = stack.enter_context(open_engine(block_size=LARGEST_CHUNK, queue_depth=8, threads=len(members)))
        buffer = host_tensor(PART_READ)

        def read(place: int, nbytes: int) -> torch.Tensor:
            engine.read(file, place, buffer.data_ptr(), nbytes).wait()
            return buffer[:nbytes]

        return read

    def _whole(self, members: Sequence[_aio.File]) -> _aio.File:
        return members[0] if len(members) == 1 else _aio.File.striped(members, self._stripe.chunk, self._stripe.order)

    def compare(self) -> None:
        """Read the states and compare checksums, if the run keeps any.

        Raises ChecksumError if they differ, and other OSErrors if a read fails.
        """
        if not self._checksums:
            return
        with ExitStack() as stack:
            members = [_aio.File(-1, _opened(path, stack), str(path)) for path in self._paths]
            file = self._whole(members)
            file.keep_checksums(len(self._checksums) // 4 * self._block, self._block)
            file.restore_checksums(self._checksums)
            engine = stack.enter_context(open_engine(block_size=LARGEST_CHUNK, queue_depth=8, threads=1))
            buffer = host_tensor(_VERIFIED)
            for place, nbytes in self.places.values():
                for start in range(0, nbytes, _VERIFIED):
                    part = min(nbytes - start, _VERIFIED)
                    request = engine.read(file, place + start, buffer.data_ptr(), part)
                    try:
                        request.wait()
                    except OSError as error:
                        if not request.mismatch:
                            raise
                        text = f"checksum mismatch in the committed states: {error.strerror}"
                        raise ChecksumError(errno.EBADMSG, text, str(error.filename)) from None

    def read(self, unit: int, state: State, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of an extent, from `offset` on. Raises OSError."""
        start = self.places[unit, state][0] + offset
        with ExitStack() as stack:
            files: dict[int, int] = {}
            for member, place, nbytes in self._stripe.pieces(start, len(target)):
                if member not in files:
                    files[member] = _opened(self._paths[member], stack)
                _read(files[member], target[:nbytes], place, self._paths[member])
                target = target[nbytes:]


class Shards:
    """The states of all ranks that hold a part of the model. Parameters are found by their names."""

    def __init__(self, ranks: Sequence[RankStates]) -> None:
        """ranks: by number of their shard. Raises CheckpointError if they differ in their units or formats."""
        self.ranks = list(ranks)
        first = ranks[0]
        with well_formed(first.path):
            _require(len(ranks) == first.layout["shards"], "the number of ranks")
            rule, moments = cast(RuleName, first.layout["rule"]), cast(MomentFormat, first.layout["moments"])
            for unit in first.units:
                formats = [state_format(unit.layout.dtype, master, rule, moments) for master in _MASTERS]
                has_records = bool(unit.layout.windows) or not unit.layout.trainable
                fits = has_records or unit.stored[State.OPTIM].form in formats
                _require(fits, f"the states of unit {unit.layout.name}")
            if any(_settings(each.layout) != _settings(first.layout) for each in ranks):
                raise CheckpointError(
                    f"{first.path.parent} has files of different runs, since ranks differ in their units or formats: "
                    "copy the files of one run to it"
                )
        self.slots = {slot.name: (unit, slot) for unit in first.units for slot in unit.layout.slots}
        """Name of a parameter → its unit and its place there."""

    def read(self, name: str, kind: StateKind, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of a parameter's state, flat; with `kind.per` > 1, the values of all.

        kind: as named in an index. An fp32 parameter is its own master; the master of a bf16 parameter may be split.
        """
        unit, slot = self.slots[name]
        stop = slot.numel if stop is None else stop
        if slot.record is not None and (kind.name != "master" or slot.record.master is not None):
            return self._recorded(unit, slot, kind, start, stop)
        if kind.name in unit.kinds:
            return self._stored(unit, slot, kind.name, start, stop)
        param = self._stored(unit, slot, "param", start, stop)
        if "remainder" not in unit.kinds:
            return param
        return join_master(param, self._stored(unit, slot, "remainder", start, stop))

    def parts(self, name: str, kind: StateKind) -> Iterator[torch.Tensor]:
        """Yield the elements of a parameter's state in order, at most `PART` at once. kind: one with `per` of 1."""
        numel = self.slots[name][1].numel
        for start in range(0, numel, PART):
            yield self.read(name, kind, start, min(start + PART, numel))

    def _recorded(self, unit: SavedUnit, slot: Slot, kind: StateKind, start: int, stop: int) -> torch.Tensor:
        """Return elements of a state of a rule in Python; of one with a shape of its own, all."""
        assert slot.record is not None
        try:
            place = slot.record.field_of(kind)
        except KeyError:
            raise CheckpointError(f"{self.ranks[0].path.parent} has no {kind.name} of {slot.name}") from None
        form = RecordsFormat(unit.layout)
        shard, offset = divmod(form.places[unit.layout.slots.index(slot)], form.shard_nbytes)
        first, count = (start, stop - start) if kind.shape is None else (0, prod(kind.shape))
        values = torch.empty(count, dtype=kind.dtype)
        target: memoryview = values.view(torch.uint8).numpy().data
        offset += place.first + first * kind.dtype.itemsize
        self.ranks[shard].read(unit.layout.index, State.OPTIM, offset, target)
        return values

    def _stored(self, unit: SavedUnit, slot: Slot, name: str, start: int, stop: int) -> torch.Tensor:
        state, kind = unit.kinds[name]
        values = torch.empty(kind.length(stop - start), dtype=kind.dtype)
        target: memoryview = values.view(torch.uint8).numpy().data
        for shard, offset, nbytes in unit.ranges(name, slot.offset + start, slot.offset + stop):
            self.ranks[shard].read(unit.layout.index, state, offset, target[:nbytes])
            target = target[nbytes:]
        return values


def file_sizes(layout: Mapping[str, Any]) -> list[int]:
    """Return the bytes of a rank's file in each folder."""
    nbytes = int(layout["nbytes"])
    return [nbytes] if layout["folders"] == 1 else stripe_of(layout).sizes(nbytes)


def stripe_of(layout: Mapping[str, Any]) -> Stripe:
    """Return the stripe of a layout. Raises ValueError if its weights are none."""
    folders = int(layout["folders"])
    _require(0 < folders <= _LONGEST_STRIPE, "the number of folders")
    weights = tuple(layout.get("weights", (1,) * folders))
    _require({*map(type, weights)} == {int} and len(weights) == folders, "the weights of the stripe")
    _require(min(weights) >= 0 < sum(weights) <= _LONGEST_STRIPE, "the weights of the stripe")
    return Stripe(int(layout["chunk"]), weights)


def _settings(layout: Mapping[str, Any]) -> list[Any]:
    """Return what all ranks of a run have in common."""
    names = ("ranks", "model_parallel", "shards", "optimizer", "rule", "moments")
    shared = ("dtype", "trainable", "numel", "slots", "windows", "records")
    units = [[unit.get(name) for name in shared] for unit in layout["units"]]
    return [[layout[name] for name in names], units]


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Raise CheckpointError for errors in the block, which reads the manifest of `path`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the manifest of {path} is damaged, it lacks or misstates {error}: restore the files, or use a checkpoint"
        ) from None


def _unit(number: int, unit: Mapping[str, Any], shards: int) -> SavedUnit:
    slots = tuple(Slot(str(name), tuple(shape), offset, group) for name, shape, offset, group in unit["slots"])
    dtype, trainable, numel = _dtype(unit["dtype"]), bool(unit["trainable"]), int(unit["numel"])
    windows = tuple(Window(*map(int, window)) for window in unit.get("windows", ()))
    if windows:
        records = (_record(slot, record) for slot, record in zip(slots, unit["records"], strict=True))
        slots = tuple(replace(slot, record=record) for slot, record in zip(slots, records, strict=True))
    layout = UnitLayout(number, unit["name"], slots, dtype, trainable, numel, shards, unit["first"], windows)
    _require(shards > 0 and numel > 0 and not numel % (shards * SLOT_ALIGNMENT), "the shards of a unit")
    end = 0
    for slot in slots:
        _require(all(type(number) is int for number in (*slot.shape, slot.offset)), "the shape of a parameter")
        _require(min(slot.shape, default=0) >= 0, "the shape of a parameter")
        _require(end <= slot.offset and not slot.offset % SLOT_ALIGNMENT and slot.stop <= numel, "a place")
        end = slot.stop
    stored = {State.PARAM: Stored(StateFormat((StateKind("param", dtype),)), layout.shard_numel, layout.shard_nbytes)}
    if trainable:
        kinds = tuple(StateKind(name, _dtype(of), per) for name, of, per in unit["states"])
        _require(all(0 < kind.per <= SLOT_ALIGNMENT for kind in kinds), "the blocks of a state")
        tile = min(int(unit["tile"]), layout.shard_numel)
        _require(tile > 0 and not tile % SLOT_ALIGNMENT, "the tiles of a unit")
        nbytes = 0
        if windows:
            _check_windows(layout)
            nbytes = RecordsFormat(layout).shard_nbytes
        stored[State.OPTIM] = Stored(StateFormat(kinds), tile, nbytes)
    return SavedUnit(layout, stored)


def _record(slot: Slot, saved: Sequence[Any]) -> Record:
    """Return the record of a slot, as `infinity.durable.manifest` describes it."""
    has_master, shown, after = saved
    fields = [
        Field(str(name), _dtype(dtype), tuple(shape), first, is_number)
        for name, dtype, shape, first, is_number in shown
    ]
    _require(all(type(n) is int and n >= 0 for each in fields for n in (*each.shape, each.first)), "a state")
    _require(len(after) > 0, "the states of a parameter")
    master = Field("master", torch.float32, slot.shape) if has_master else None
    return Record(master, tuple(States(tuple(fields[n] for n in numbers)) for numbers in after))


def _check_windows(layout: UnitLayout) -> None:
    """Raise ValueError unless the windows cover each shard and each slot in order."""
    end = last = 0
    for window in layout.windows:
        _require(window.start == end < window.stop and window.first == last <= window.last, "a window")
        shard = window.start // layout.shard_numel
        _require(window.stop <= (shard + 1) * layout.shard_numel, "a window")
        for slot in layout.slots[window.first : window.last]:
            _require(window.start <= slot.offset and slot.stop <= window.stop, "a window")
        end, last = window.stop, window.last
    _require(end == layout.numel and last == len(layout.slots), "the windows")


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {name}")
    return dtype


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _opened(path: Path, stack: ExitStack) -> int:
    """Open a file until the end of `stack`. Raises CheckpointError, with its name, if it is missing or no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the files of all ranks are needed, also those on the drives of other machines. Copy "
            "them to this folder, or resume with the number of ranks and the settings that wrote them"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its drive and permissions") from error
    stack.callback(os.close, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise CheckpointError(f"{path} is not a regular file: restore it")
    return fd


def _read(fd: int, target: memoryview, place: int, path: Path) -> None:
    while target:
        try:
            count = os.preadv(fd, [target], place)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        if not count:
            raise CheckpointError(f"{path} was cut short while it was read: restore it, or use a checkpoint")
        target, place = target[count:], place + count
