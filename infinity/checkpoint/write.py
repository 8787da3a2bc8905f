"""Writes the files of a checkpoint: those of units, from their tiers, or copies of a durable run's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from infinity.checkpoint.agree import together
from infinity.checkpoint.committed import Committed, check_space, copy_states
from infinity.checkpoint.format import BUFFERS, key, states_file, view
from infinity.checkpoint.snapshot import Snapshot, unit_file
from infinity.checkpoint.tiles import write_tile
from infinity.checkpoint.writer import Writer
from infinity.comm.side import SideChannel
from infinity.nn.pieces import Piece
from infinity.plan.formats import StateKind
from infinity.plan.layout import UnitLayout
from infinity.tiers.memory import return_freed_memory
from infinity.units.records import Flats
from infinity.units.states import UnitStates

_Value = tuple[StateKind, Piece, torch.Tensor]
"""One state of a parameter."""


@dataclass(frozen=True)
class Copying:
    """States of this rank to copy, and the hidden folder that all ranks write."""

    committed: Committed
    folder: Path


def write_states(
    snapshot: Snapshot,
    states: UnitStates,
    channel: SideChannel,
    writer: Writer | None,
    release_unit: Callable[[int], None],
) -> None:
    """Write all files. Collective. release_unit: called with each unit once its states are in memory on this rank."""
    needed = channel.rank == 0 or channel.shards > 1

    def read(layout: UnitLayout) -> Flats:
        flats = states.read_shards(layout) if needed else {}
        release_unit(layout.index)
        return flats

    def write(layout: UnitLayout, values: Sequence[_Value]) -> None:
        if writer is None:
            return
        whole = {key(kind.name, piece.name): value for kind, piece, value in values if not piece.place}
        if whole:
            writer.write(unit_file(layout), whole)
        for kind, piece, value in values:
            if piece.place:
                write_tile(writer, snapshot.index, kind, piece, value)

    for layout in snapshot.layouts:
        flats = together(channel, partial(read, layout))
        states.complete(flats)
        values = _values(snapshot, layout, flats, states, channel) if channel.rank == 0 else []
        together(channel, partial(write, layout, values))
        del flats, values
        return_freed_memory()
    together(channel, partial(_finish, snapshot, writer))


def _values(
    snapshot: Snapshot, layout: UnitLayout, flats: Flats, states: UnitStates, channel: SideChannel
) -> list[_Value]:
    """Return the states of a unit's parameters, complete on the rank that writes."""
    values = []
    for kind in states.kinds(layout):
        for slot in layout.slots:
            if slot.name not in snapshot.pieces:
                continue
            value, divided = view(kind, slot, flats[kind.name]), snapshot.divided.get(slot.name)
            whole = value if divided is None else channel.join(value, divided.places, divided.shape)
            values.append((kind, snapshot.pieces[slot.name], whole))
    return values


def choose_committed(
    channel: SideChannel,
    committed: Committed | None,
    snapshot: Snapshot,
    layouts: Sequence[UnitLayout],
    writer: Writer | None,
) -> Copying | None:
    """Return how to copy `committed`; None if some rank cannot save these states by a copy. Collective.

    The copies hold whole units. They cannot leave out parameters, and cannot join tiles of a tensor or parts of
    tensor-parallel ranks. All ranks must see one folder. layouts: of all units.
    """
    slots = [slot for layout in layouts for slot in layout.slots]
    is_whole = all(snapshot.pieces.get(slot.name) == Piece(slot.name, slot.shape) for slot in slots)
    can = committed is not None and is_whole and not snapshot.divided
    if channel.sum(float(not can)):
        return None
    folder = Path(next(filter(None, channel.gather("" if writer is None else str(writer.folder.absolute())))))
    assert committed is not None
    return None if channel.sum(float(not folder.is_dir())) else Copying(committed, folder)


def write_committed(
    snapshot: Snapshot,
    copying: Copying,
    channel: SideChannel,
    writer: Writer | None,
    release_unit: Callable[[int], None],
) -> None:
    """Write all files, each rank those of its states. Collective. release_unit: as of `copy_states`."""
    committed, folder = copying.committed, copying.folder
    together(channel, partial(check_space, folder, round(channel.sum(float(committed.nbytes)))))
    written = channel.gather(together(channel, partial(copy_states, committed, folder, release_unit)))

    def finish() -> None:
        if writer is not None:
            for files in written:
                writer.add(files)
        _finish(_sharded(snapshot, committed.shards), writer)

    together(channel, finish)


def _sharded(snapshot: Snapshot, shards: int) -> Snapshot:
    """Return the snapshot with an index whose states are in `shards` files, one per rank."""
    entries = {name: replace(entry, file=states_file(0)) for name, entry in snapshot.index.parameters.items()}
    return replace(snapshot, index=replace(snapshot.index, parameters=entries, shards=shards))


def _finish(snapshot: Snapshot, writer: Writer | None) -> None:
    """Write the files without states of units, and publish the checkpoint."""
    if writer is None:
        return
    writer.write(BUFFERS, snapshot.buffers)
    for file, content in snapshot.raw.items():
        writer.write_raw(file, content)
    writer.finish(snapshot.index, latest=snapshot.latest)
