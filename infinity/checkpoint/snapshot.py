"""Captures all of a checkpoint except the states of its units, at the call of save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.format import CLIENT_STATE, Entry, Index, aliases_of_buffers, buffers_in_memory
from infinity.checkpoint.parts import ModelParts, Run
from infinity.comm.dtensor import is_distributed
from infinity.comm.side import Place, SideChannel
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.layout import UnitLayout
from infinity.units.compiled import own_name


@dataclass(frozen=True)
class Divided:
    """A parameter sharded by tensor parallelism: its global shape, and the place of each rank's part."""

    shape: tuple[int, ...]
    places: list[Place]


@dataclass(frozen=True)
class Snapshot:
    """All of a checkpoint except the states of its units, captured at the call of save."""

    index: Index
    """The index, without sizes and checksums of files."""
    raw: dict[str, bytes]
    """File name → content."""
    buffers: dict[str, torch.Tensor]
    """Persistent buffers; empty on ranks that do not write."""
    layouts: list[UnitLayout]
    """Units in the order in which they are saved."""
    divided: dict[str, Divided]
    """Parameters that tensor parallelism shards."""
    pieces: dict[str, Piece]
    """Saved parameters by name: the tensor of the index that each is, or of which it is a tile."""
    latest: bool
    """True to update the file `latest`."""


def capture(
    parts: ModelParts,
    model: nn.Module,
    run: Run,
    channel: SideChannel,
    client_state: bytes,
    *,
    latest: bool,
    leaves_out: Callable[[nn.Parameter], bool],
) -> Snapshot:
    """leaves_out: returns True for a parameter to omit."""
    entries: dict[str, Entry] = {}
    divided, pieces, found = {}, {}, Pieces(model)
    saved: dict[int, str] = {}
    for unit in parts.units:
        dtype = str(unit.layout.dtype).removeprefix("torch.")
        for slot, parameter, step in zip(unit.layout.slots, unit.parameters, unit.steps, strict=True):
            if leaves_out(parameter):
                continue
            piece = pieces[slot.name] = found.of(slot.name, parameter)
            saved[id(parameter)] = piece.name
            file = f"tiled-{len(entries):05d}.safetensors" if piece.place else unit_file(unit.layout)
            entry = Entry(piece.shape, dtype, unit.layout.trainable, file, step, slot.group)
            if entries.setdefault(piece.name, entry).step != step:
                raise CheckpointError(f"tiles of {piece.name} had different numbers of updates: use all of them alike")
            if is_distributed(parameter):
                divided[slot.name] = Divided(piece.shape, channel.of_model(parts.ranks.model.place(parameter)))
    generators = rng.pack_states(channel, parts.device.torch_device)
    return Snapshot(
        index=_index(run, entries, {**_aliases(model, found, saved), **aliases_of_buffers(model)}),
        raw={CLIENT_STATE: client_state, rng.FILE: generators},
        buffers=buffers_in_memory(model) if channel.writes else {},
        layouts=[layout for layout in _order(parts, channel) if any(slot.name in pieces for slot in layout.slots)],
        divided=divided,
        pieces=pieces,
        latest=latest,
    )


def _order(parts: ModelParts, channel: SideChannel) -> list[UnitLayout]:
    """Return the units in the order of their next update, so that training waits for the save as little as possible."""
    trace = parts.schedule.trace.known("train")
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


def unit_file(layout: UnitLayout) -> str:
    return f"unit-{layout.index:05d}.safetensors"


def _aliases(model: nn.Module, found: Pieces, saved: Mapping[int, str]) -> dict[str, str]:
    """Return further name of a shared parameter → the name under which it is saved. saved: those names by `id`."""
    named = model.named_parameters(remove_duplicate=False)
    names = [(found.of(own_name(name), p).name, saved[id(p)]) for name, p in named if id(p) in saved]
    return {name: first for name, first in names if name != first}


def _index(run: Run, entries: dict[str, Entry], aliases: dict[str, str]) -> Index:
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
        aliases=aliases,
    )
