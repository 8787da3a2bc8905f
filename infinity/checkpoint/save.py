"""Saves a checkpoint: one safetensors file per unit, with a part of a unit in memory at a time, or copies of a durable
run's files. The checkpoint appears complete or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.agree import target_of, together
from infinity.checkpoint.archive import read_values
from infinity.checkpoint.background import Saver, Saving
from infinity.checkpoint.committed import Committed, check_space, copy_states
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, Index, key, reason, states_file
from infinity.checkpoint.snapshot import ModelParts, Run, Snapshot, capture
from infinity.checkpoint.tensors import Spec
from infinity.checkpoint.writer import Writer
from infinity.comm.side import SideChannel
from infinity.errors import CheckpointError, ChecksumError, RanksError
from infinity.interrupts import uninterrupted
from infinity.nn.pieces import Piece
from infinity.plan.formats import StateKind
from infinity.plan.layout import UnitLayout
from infinity.tiers.device import Device
from infinity.tiers.freed import return_freed_memory
from infinity.units.states import Flats, UnitStates


class _Values(NamedTuple):
    """Values of a state of a parameter's elements from number `first` on."""

    kind: StateKind
    piece: Piece
    first: int
    values: torch.Tensor


def write_states(
    snapshot: Snapshot,
    states: UnitStates,
    channel: SideChannel,
    writer: Writer | None,
    release_unit: Callable[[int], None],
) -> None:
    """Write all files. Collective. release_unit: called with each unit once its states have been read on this rank."""
    needed = channel.rank == 0 or channel.shards > 1
    specs = _specs(snapshot.index)

    def read(layout: UnitLayout, start: int, stop: int, is_whole: bool) -> Flats:
        if not needed:
            return {}
        return states.read_shards(layout) if is_whole else states.read_range(layout, start, stop)

    def write(layout: UnitLayout, values: Iterable[_Values], is_last: bool) -> None:
        if writer is None:
            return
        for slot in layout.slots:
            if slot.name in snapshot.pieces:
                file = snapshot.index.parameters[snapshot.pieces[slot.name].name].file
                writer.piecewise(file, specs[file])
        for kind, piece, first, part in values:
            file = snapshot.index.parameters[piece.name].file
            for start, run in piece.spread(part, first, kind.per):
                writer.piecewise(file, specs[file]).write(key(kind.name, piece.name), start, run)
        if is_last:
            writer.finish_whole()

    for layout in snapshot.layouts:
        # Parts of tensor-parallel ranks are joined to whole parameters.
        is_whole = bool(layout.windows) or any(slot.name in snapshot.divided for slot in layout.slots)
        ranges = [(0, layout.shard_numel)] if is_whole else states.ranges(layout)
        for start, stop in ranges:
            is_last = stop == layout.shard_numel
            flats = together(channel, partial(read, layout, start, stop, is_whole))
            if is_last:
                release_unit(layout.index)
            states.complete(flats)
            values: Iterable[_Values] = ()
            if channel.rank == 0 and is_whole:
                values = _whole_parameters(snapshot, layout, flats, states, channel)
            elif channel.rank == 0:
                values = _parts_of_shards(snapshot, layout, start, stop, flats, states)
            together(channel, partial(write, layout, values, is_last))
            del flats, values
        return_freed_memory()
    together(channel, partial(_finish, snapshot, writer))


def _specs(index: Index) -> dict[str, dict[str, Spec]]:
    """Return file → its tensors: the first state of each parameter, the second, …"""
    by_file: dict[str, list[list[tuple[str, Spec]]]] = {}
    for name, entry in index.parameters.items():
        kinds = [(key(kind.name, name), Spec(kind.dtype, kind.shape_in(entry.shape))) for kind in index.kinds(name)]
        by_file.setdefault(entry.file, []).append(kinds)
    return {file: dict(filter(None, chain(*zip_longest(*held)))) for file, held in by_file.items()}


def _whole_parameters(
    snapshot: Snapshot, layout: UnitLayout, flats: Flats, states: UnitStates, channel: SideChannel
) -> list[_Values]:
    """Return the states of a unit's parameters, complete on the rank that writes."""
    found = []
    for number, slot in enumerate(layout.slots):
        if slot.name not in snapshot.pieces:
            continue
        piece, divided = snapshot.pieces[slot.name], snapshot.divided.get(slot.name)
        updates = snapshot.index.parameters[piece.name].step
        views = states.of_slot(layout, flats, number, updates)
        for kind in states.kinds(layout, number, updates):
            own = views[kind.name]
            found.append(_Values(kind, piece, 0, own if divided is None else channel.join(own, divided, piece.shape)))
    return found


def _parts_of_shards(
    snapshot: Snapshot, layout: UnitLayout, start: int, stop: int, flats: Flats, states: UnitStates
) -> Iterator[_Values]:
    """Yield the states of parameters' elements in range [start, stop) of each shard. flats: as of `read_range`."""
    kinds, numel = states.kinds(layout), stop - start
    for shard in range(layout.world_size):
        low = shard * layout.shard_numel + start
        for number, begin, end in layout.slots_in(low, low + numel):
            slot = layout.slots[number]
            if slot.name not in snapshot.pieces:
                continue
            # The values of shards lie one after the other, each `numel` elements.
            inside = shard * numel + begin - low
            for kind in kinds:
                values = flats[kind.name][kind.part(inside, inside + end - begin)]
                yield _Values(kind, snapshot.pieces[slot.name], begin - slot.offset, values)


def folder_of_copies(
    channel: SideChannel,
    committed: Committed | None,
    snapshot: Snapshot,
    layouts: Sequence[UnitLayout],
    writer: Writer | None,
) -> Path | None:
    """Return the hidden folder to which all ranks copy `committed`; None if some rank cannot save its states by a copy.
    Collective.

    The copies hold whole units. They cannot leave out parameters, and cannot join tiles of a tensor or parts of
    tensor-parallel ranks. All ranks must see one folder. layouts: of all units.
    """
    slots = [slot for layout in layouts for slot in layout.slots]
    is_whole = all(snapshot.pieces.get(slot.name) == Piece(slot.name, slot.shape) for slot in slots)
    can = committed is not None and is_whole and not snapshot.divided
    if channel.sum(float(not can)):
        return None
    folder = Path(next(filter(None, channel.gather("" if writer is None else str(writer.folder.absolute())))))
    return None if channel.sum(float(not folder.is_dir())) else folder


def write_committed(
    snapshot: Snapshot,
    committed: Committed,
    folder: Path,
    channel: SideChannel,
    writer: Writer | None,
    release_unit: Callable[[int], None],
) -> None:
    """Write all files, each rank those of its states. Collective. release_unit: as of `copy_states`."""
    together(channel, partial(check_space, folder, round(channel.sum(float(committed.nbytes)))))
    written = channel.gather(together(channel, partial(copy_states, committed, folder, release_unit)))

    def finish() -> None:
        if writer is not None:
            for files in written:
                writer.add(files)
        entries = {name: replace(entry, file=states_file(0)) for name, entry in snapshot.index.parameters.items()}
        index = replace(snapshot.index, parameters=entries, shards=committed.shards)
        _finish(replace(snapshot, index=index), writer)

    together(channel, finish)


def _finish(snapshot: Snapshot, writer: Writer | None) -> None:
    """Write the files without states of units, and publish the checkpoint."""
    if writer is None:
        return
    writer.write(BUFFERS, snapshot.buffers)
    for file, content in snapshot.raw.items():
        writer.write_raw(file, content)
    writer.finish(snapshot.index, latest=snapshot.latest)


def save(
    parts: ModelParts,
    saver: Saver,
    model: nn.Module,
    run: Run,
    directory: str | Path,
    tag: str | None,
    client_state: dict[str, Any],
    *,
    background: bool = False,
    latest: bool,
    leaves_out: Callable[[nn.Parameter], bool],
    committed: Committed | None = None,
) -> Path:
    """Write directory/tag and return its path. Collective; all states must be in their tiers, and rank 0 writes.

    Memory holds a range of a unit (`UnitStates.ranges`), or all of its states where parameters are updated as a whole
    or tensor-parallel. tag: None means "global_step<N>". background: return once everything except the states of units
    is captured; `saver` completes the save. latest: update the file `latest`.
    leaves_out: returns True for a parameter to omit. committed: the present states in files of a durable run, which
    are copied if every rank has them; otherwise states are read from their tiers. Raises on every rank: RanksError if
    ranks pass different folders, CheckpointError if writing failed. The previous checkpoint is untouched then.
    """
    tag = f"global_step{run.progress.global_steps}" if tag is None else tag
    target = target_of(parts.ranks, directory, tag, background)
    channel = saver.channel(parts.ranks)
    packed = together(channel, partial(pack_client_state, client_state))
    writer = Writer(target.parent, target.name) if channel.writes else None
    started = False
    try:
        together(channel, lambda: writer.open() if writer is not None else None)
        snapshot = capture(parts, model, run, channel, packed, latest=latest, leaves_out=leaves_out)
        states = replace(parts.states, ranks=channel)
        write = partial(write_states, snapshot, states, channel, writer)
        layouts = [unit.layout for unit in parts.units]
        folder = folder_of_copies(channel, committed, snapshot, layouts, writer)
        if committed is not None and folder is not None:
            write = partial(write_committed, snapshot, committed, folder, channel, writer)
        if background:
            saving = Saving(target, (unit.index for unit in parts.units))
            with uninterrupted():
                # Writes to a unit's states wait until the save has read them.
                if committed is not None and folder is not None:
                    committed.keep(saving.snapshot_read)
                else:
                    for unit in parts.units:
                        unit.write_after(saving.snapshot_read(unit.index))
                saver.start(saving, partial(_write_beside, write, states.device, writer))
                started = True
        else:
            write(lambda unit: None)
    except BaseException as error:
        if writer is not None and not started:
            writer.remove()
        if isinstance(error, Exception) and not isinstance(error, (ChecksumError, RanksError)):
            raise CheckpointError(
                f"the checkpoint {target} could not be written: {str(error) or type(error).__name__}"
            ) from error
        raise
    return target


def _write_beside(
    write: Callable[[Callable[[int], None]], None], device: Device, writer: Writer | None, saving: Saving
) -> None:
    """Write all files while training continues. Holds no reference to model or engine, which may be freed meanwhile."""
    device.enter_thread()
    try:
        write(saving.release_unit)
    except BaseException:
        if writer is None or not writer.whole:  # otherwise another rank was lost after the checkpoint was complete
            raise
    finally:
        if writer is not None:
            writer.remove()


def pack_client_state(client_state: dict[str, Any]) -> bytes:
    """Return the pickled client_state. Loads it once, so that no unreadable checkpoint replaces a readable one."""
    if not isinstance(client_state, dict):
        raise CheckpointError(
            f"client_state is a {type(client_state).__name__}: pass a dict, such as {{'epoch': 3}}, which "
            "load_checkpoint() returns."
        )
    try:
        packed = rng.pack(client_state)
        read_values(io.BytesIO(packed), Path(CLIENT_STATE))
    except Exception as error:  # noqa: BLE001 - pickling runs any class's code
        raise CheckpointError(
            f"client_state cannot be saved for a safe load ({reason(error)}): use only tensors, numbers, strings, and "
            "lists, tuples and dicts of them"
        ) from None
    return packed
