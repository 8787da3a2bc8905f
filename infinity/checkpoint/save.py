"""Saves a checkpoint: one safetensors file per unit, with one unit in memory at a time. The checkpoint appears complete
or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.agree import target_of
from infinity.checkpoint.background import Saver, Saving
from infinity.checkpoint.committed import Committed, check_space, copy_states
from infinity.checkpoint.format import (
    BUFFERS,
    CLIENT_STATE,
    Entry,
    Index,
    key,
    persistent_buffers,
    reason,
    states_file,
    view,
)
from infinity.checkpoint.parts import ModelParts, Run
from infinity.checkpoint.pickles import read_values
from infinity.checkpoint.tiles import write_tile
from infinity.checkpoint.writer import Writer
from infinity.comm.dtensor import is_distributed
from infinity.comm.side import Place, SideChannel
from infinity.errors import CheckpointError, ChecksumError, RanksError
from infinity.interrupts import uninterrupted
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.formats import StateKind
from infinity.plan.layout import UnitLayout
from infinity.tiers.device import Device
from infinity.tiers.memory import return_freed_memory
from infinity.units.records import Flats
from infinity.units.states import UnitStates

T = TypeVar("T")
_Value = tuple[StateKind, Piece, torch.Tensor]
"""One state of a parameter."""


@dataclass(frozen=True)
class _Divided:
    """A parameter sharded by tensor parallelism: its global shape, and the place of each rank's part."""

    shape: tuple[int, ...]
    places: list[Place]


@dataclass(frozen=True)
class _Snapshot:
    """All of a checkpoint except the states of its units, captured at the call of save."""

    index: Index
    """The index, without sizes and checksums of files."""
    raw: dict[str, bytes]
    """File name → content."""
    buffers: dict[str, torch.Tensor]
    """Persistent buffers; empty on ranks that do not write."""
    layouts: list[UnitLayout]
    """Units in the order in which they are saved."""
    divided: dict[str, _Divided]
    """Parameters that tensor parallelism shards."""
    pieces: dict[str, Piece]
    """Saved parameters by name: the tensor of the index that each is, or is a tile of."""
    latest: bool
    """True to update the file `latest`."""


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
    latest: bool = True,
    frozen: bool = True,
    committed: Committed | None = None,
) -> Path:
    """Write directory/tag and return its path. Collective; all states must be in their tiers, and rank 0 writes.

    Peak memory is a few times one unit's states. tag: None means "global_step<N>". background: return once everything
    except the states of units is captured; `saver` completes the save. latest: update the file `latest`. frozen:
    include parameters that do not require gradients. committed: the present states in files of a durable run, which
    are copied if every rank has them, and read from their tiers otherwise. Raises on every rank: RanksError if ranks pass different folders,
    CheckpointError if writing failed on rank 0. The previous checkpoint is untouched then.
    """
    tag = f"global_step{run.global_steps}" if tag is None else tag
    target = target_of(parts.ranks, directory, tag, background)
    channel = saver.channel(parts.ranks)
    packed = _together(channel, partial(pack_client_state, client_state))
    writer = Writer(target.parent, target.name) if channel.writes else None
    started = False
    try:
        _together(channel, lambda: writer.open() if writer is not None else None)
        snapshot = _capture(parts, model, run, channel, packed, latest=latest, frozen=frozen)
        states = replace(parts.states, ranks=channel)
        write = partial(_write, snapshot, states, channel, writer)
        folder = _shared_folder(channel, writer)
        taken = _agreed(channel, committed, snapshot, [unit.layout for unit in parts.units], folder)
        if taken is not None:
            write = partial(_write_committed, _sharded(snapshot, taken.shards), taken, folder, channel, writer)
        if background:
            saving = Saving(target, (unit.index for unit in parts.units))
            with uninterrupted():
                # Writes to a unit's states wait until the save has read them.
                if taken is not None:
                    taken.keep(saving.snapshot_read)
                else:
                    for unit in parts.units:
                        unit.snapshot_read = saving.snapshot_read(unit.index)
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


def _capture(
    parts: ModelParts,
    model: nn.Module,
    run: Run,
    channel: SideChannel,
    client_state: bytes,
    *,
    latest: bool,
    frozen: bool,
) -> _Snapshot:
    entries: dict[str, Entry] = {}
    divided, pieces, found = {}, {}, Pieces(model)
    for unit in parts.units:
        dtype = str(unit.layout.dtype).removeprefix("torch.")
        for slot, parameter, step in zip(unit.layout.slots, unit.parameters, unit.steps, strict=True):
            if not (frozen or parameter.requires_grad):
                continue
            piece = pieces[slot.name] = found.of(slot.name, parameter)
            file = f"tiled-{len(entries):05d}.safetensors" if piece.place else _file(unit.layout)
            entry = Entry(piece.shape, dtype, unit.layout.trainable, file, step, slot.group)
            if entries.setdefault(piece.name, entry).step != step:
                raise CheckpointError(f"tiles of {piece.name} had different numbers of updates: use all of them alike")
            if is_distributed(parameter):
                divided[slot.name] = _Divided(piece.shape, channel.of_model(parts.ranks.model.place(parameter)))
    generators = rng.pack_states(channel, parts.device.torch_device)
    return _Snapshot(
        index=_index(run, entries),
        raw={CLIENT_STATE: client_state, rng.FILE: generators},
        buffers=_host(persistent_buffers(model)) if channel.writes else {},
        layouts=[layout for layout in _order(parts, channel) if any(slot.name in pieces for slot in layout.slots)],
        divided=divided,
        pieces=pieces,
        latest=latest,
    )


def _order(parts: ModelParts, channel: SideChannel) -> list[UnitLayout]:
    """Return the units in the order of their next update, so that training waits for the save as little as possible."""
    trace = parts.store.tracer.known("train")
    backwards = parts.plan.update == "during_backward"
    places = {unit: place for place, unit in enumerate(trace.by_last_use() if backwards else trace.by_first_use())}
    order = torch.tensor(
        sorted(
            range(len(parts.units)),
            key=lambda unit: (not parts.units[unit].layout.trainable, places.get(unit, len(places)), unit),
        )
    )
    channel.agree(order)  # since ranks exchange shards in this order
    return [parts.units[unit].layout for unit in order.tolist()]


def _write(
    snapshot: _Snapshot,
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
            writer.write(_file(layout), whole)
        for kind, piece, value in values:
            if piece.place:
                write_tile(writer, snapshot.index, kind, piece, value)

    for layout in snapshot.layouts:
        flats = _together(channel, partial(read, layout))
        states.complete(flats)
        values = _values(snapshot, layout, flats, states, channel) if channel.rank == 0 else []
        _together(channel, partial(write, layout, values))
        del flats, values
        return_freed_memory()
    _together(channel, partial(_finish, snapshot, writer))


def _finish(snapshot: _Snapshot, writer: Writer | None) -> None:
    """Write the files without states of units, and publish the checkpoint."""
    if writer is None:
        return
    writer.write(BUFFERS, snapshot.buffers)
    for file, content in snapshot.raw.items():
        writer.write_raw(file, content)
    writer.finish(snapshot.index, latest=snapshot.latest)


def _shared_folder(channel: SideChannel, writer: Writer | None) -> Path:
    """Return the hidden folder of the rank that writes."""
    return Path(next(filter(None, channel.gather("" if writer is None else str(writer.folder.absolute())))))


def _agreed(
    channel: SideChannel, committed: Committed | None, snapshot: _Snapshot, layouts: Sequence[UnitLayout], folder: Path
) -> Committed | None:
    """Return `committed` if all ranks can save these states as they are, None otherwise.

    They have no place for parts of the states: parameters that are left out, tiles of a tensor, or parts of
    tensor-parallel ranks. Ranks need one folder. layouts: of all units.
    """
    slots = [slot for layout in layouts for slot in layout.slots]
    is_whole = all(snapshot.pieces.get(slot.name) == Piece(slot.name, slot.shape) for slot in slots)
    can = committed is not None and is_whole and not snapshot.divided and folder.is_dir()
    return None if channel.sum(float(not can)) else committed


def _sharded(snapshot: _Snapshot, shards: int) -> _Snapshot:
    """Return the snapshot with an index of states in `shards` files of ranks."""
    entries = {name: replace(entry, file=states_file(0)) for name, entry in snapshot.index.parameters.items()}
    return replace(snapshot, index=replace(snapshot.index, parameters=entries, shards=shards))


def _write_committed(
    snapshot: _Snapshot,
    committed: Committed,
    folder: Path,
    channel: SideChannel,
    writer: Writer | None,
    release_unit: Callable[[int], None],
) -> None:
    """Write all files, each rank those of its states. Collective. release_unit: as of `_write`."""
    check = partial(check_space, folder, round(channel.sum(float(committed.nbytes))))
    _together(channel, check)
    written = channel.gather(_together(channel, partial(copy_states, committed, folder, release_unit)))

    def finish() -> None:
        if writer is not None:
            for files in written:
                writer.add(files)
        _finish(snapshot, writer)

    _together(channel, finish)


def _values(
    snapshot: _Snapshot, layout: UnitLayout, flats: Flats, states: UnitStates, channel: SideChannel
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


def _write_beside(
    write: Callable[[Callable[[int], None]], None], device: Device, writer: Writer | None, saving: Saving
) -> None:
    """Write all files while training continues. Holds no reference to model or engine, which may be freed meanwhile."""

    def release_unit(unit: int) -> None:
        saving.release_unit(unit)
        saving.check_stopped()

    device.enter_thread()
    try:
        write(release_unit)
    except BaseException:
        if writer is None or not writer.whole:  # otherwise another rank was lost after the checkpoint was complete
            raise
    finally:
        if writer is not None:
            writer.remove()


def _together(channel: SideChannel, work: Callable[[], T]) -> T:
    """Return `work()`. Collective; if it fails on one rank, all ranks raise."""
    error: Exception | None = None
    try:
        done = work()
    except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know
        error = caught
    if channel.sum(float(error is not None)):
        texts = channel.gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        raise CheckpointError("; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text))
    return done


def _file(layout: UnitLayout) -> str:
    return f"unit-{layout.index:05d}.safetensors"


def pack_client_state(client_state: dict[str, Any]) -> bytes:
    """Return the pickled client_state. Loads it once, so that no unreadable checkpoint replaces a readable one."""
    if not isinstance(client_state, dict):
        raise CheckpointError(
            f"client_state is a {type(client_state).__name__}: pass a dict, such as {{'epoch': 3}}, which "
            "load_checkpoint() returns."
        )
    packed = io.BytesIO()
    try:
        torch.save(client_state, packed)
        read_values(packed, Path(CLIENT_STATE))
    except Exception as error:  # noqa: BLE001 - pickling runs any class's code
        raise CheckpointError(
            f"client_state cannot be saved for a safe load ({reason(error)}): use only tensors, numbers, strings, and "
            "lists, tuples and dicts of them"
        ) from None
    return packed.getvalue()


def _host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _index(run: Run, entries: dict[str, Entry]) -> Index:
    return Index(
        global_steps=run.global_steps,
        parameters=entries,
        file_bytes={},
        optimizer=run.optimizer,
        param_groups=run.param_groups,
        lr_scheduler=run.lr_scheduler,
        moments=run.moments,
        skipped_steps=run.skipped_steps,
        loss_scale=run.loss_scale,
    )
