"""Captures all of a checkpoint except the states of its units, at the call of save.

Parts and settings of an engine that checkpoints read and write, and the checks of both before a save or a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.format import (
    CLIENT_STATE,
    Entry,
    Index,
    Progress,
    aliases_of_buffers,
    buffers_in_memory,
    own_states,
)
from infinity.comm.communicator import Communicator
from infinity.comm.dtensor import is_distributed
from infinity.comm.side import Place, SideChannel
from infinity.errors import CheckpointError, ModelError
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.formats import StateFormat, StateKind
from infinity.plan.frozen import GROUP
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.schedule.schedule import Schedule
from infinity.tiers.device import Device
from infinity.units.compiled import own_name
from infinity.units.states import UnitStates
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.config import Config


class Runner(Protocol):
    """Fetches units (`infinity.engine.runner`)."""

    def refresh_viewed(self) -> None: ...


class ModelParts(Protocol):
    """Parts of an engine that hold the states of its units."""

    plan: Plan
    ranks: Communicator
    device: Device
    states: UnitStates
    schedule: Schedule

    @property
    def units(self) -> list[Unit]: ...
    @property
    def runner(self) -> Runner: ...


@dataclass(frozen=True)
class Run:
    """Settings and progress of a training run. Loading compares the settings and restores the progress."""

    config: Config
    progress: Progress


_KINDS: dict[str, tuple[type, ...]] = {
    "truth value": (bool,),
    "number": (int, float),
    "text": (str,),
    "list": (list, tuple),
    "section": (dict,),
}


def check_settings(run: Run, index: Index, folder: Path) -> None:
    """Raise CheckpointError if a saved value is of another kind than the present one. None is of every kind."""
    progress = run.progress
    pairs = zip(progress.param_groups, index.param_groups, strict=True)
    for name, present, saved in (
        *((f"param_groups[{number}]", *pair) for number, pair in enumerate(pairs)),
        ("lr_scheduler", progress.lr_scheduler or {}, index.lr_scheduler or {}),
        ("loss_scale", progress.loss_scale or {}, index.loss_scale or {}),
    ):
        for key, value in saved.items():
            for problem in _problems(present.get(key), value, finite=name.startswith("param_groups")):
                raise CheckpointError(f"{folder} is damaged: {name}.{key} {problem}; use another checkpoint")


def _problems(present: Any, saved: Any, *, finite: bool) -> Iterator[str]:
    """finite: numbers must be."""
    if finite and isinstance(saved, float) and not math.isfinite(saved):
        yield f"is {saved}"
    if None in (present, saved):
        return
    if _kind(present) != _kind(saved):
        yield f"is {saved!r:.40}, which is no {_kind(present)}"
    elif isinstance(saved, list) and present:
        for value in saved:
            yield from _problems(present[0], value, finite=finite)


def _kind(value: object) -> str:
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), "value")


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
    divided: dict[str, list[Place]]
    """Parameter that tensor parallelism shards → the place of each rank's part."""
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
        of_unit = zip(unit.layout.slots, unit.parameters, unit.steps, strict=True)
        for number, (slot, parameter, step) in enumerate(of_unit):
            if leaves_out(parameter):
                continue
            piece = pieces[slot.name] = found.of(slot.name, parameter)
            saved[id(parameter)] = piece.name
            file = f"tiled-{len(entries):05d}.safetensors" if piece.place else unit_file(unit.layout)
            states = None if slot.record is None else own_states(parts.states.kinds(unit.layout, number, step))
            entry = Entry(piece.shape, dtype, unit.layout.trainable, file, step, slot.group, states)
            if entries.setdefault(piece.name, entry).step != step:
                raise CheckpointError(f"tiles of {piece.name} had different numbers of updates: use all of them alike")
            if is_distributed(parameter):
                divided[slot.name] = channel.of_model(parts.ranks.model.place(parameter))
    generators = rng.pack_states(channel, parts.device.torch_device)
    return Snapshot(
        index=Index(
            parameters=entries,
            file_bytes={},
            optimizer=run.config.optimizer.type,
            moments=run.config.infinity.moments,
            rule=run.config.optimizer.rule if any(entry.states is not None for entry in entries.values()) else "",
            aliases={**_aliases(model, found, saved), **aliases_of_buffers(model)},
            **vars(run.progress),
        ),
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


def check_tiles(model: nn.Module, layouts: Iterable[UnitLayout], states: Callable[[UnitLayout], object] | None) -> None:
    """Raise ModelError if tiles of a tensor differ in a property that checkpoints save once for the tensor.

    states: unit → format of the states of trained parameters; None for inference.
    """
    pieces, parameters = Pieces(model), dict(model.named_parameters())
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for layout in layouts:
        for slot in layout.slots:
            parameter = parameters.get(slot.name)
            piece = pieces.of(slot.name, parameter) if parameter is not None else Piece(slot.name, slot.shape)
            if not piece.place:
                continue
            if parameter is not None and is_distributed(parameter):
                raise ModelError(
                    f"{slot.name} is a DTensor and a tile of {piece.name}: shard nn.Linear instead of tiles"
                )
            if slot.record is not None:
                raise ModelError(
                    f"{slot.name} is a tile of {piece.name}, and its optimizer updates whole parameters, of which a "
                    "tile is none: put tiles into a group of AdamW or another native rule, or do not tile the layer"
                )
            shown = {"requires_grad": layout.trainable, "dtype": layout.dtype, "param_group": slot.group}
            name, expected = first.setdefault(piece.name, (slot.name, shown))
            if differs := [key for key in shown if shown[key] != expected[key]]:
                raise ModelError(
                    f"{name} and {slot.name} are tiles of {piece.name}, of which a checkpoint saves one {differs[0]}, "
                    f"and they have {expected[differs[0]]} and {shown[differs[0]]}: treat them alike"
                )
            if layout.code is not None and piece.blocks(GROUP) is None:
                raise ModelError(
                    f"infinity.frozen is '{layout.code.format}', and {slot.name}, a tile of {piece.name}, begins or "
                    f"ends within a group of {GROUP} elements with a scale, so its values would differ from those "
                    f"without tiles. Let max_bytes choose the rows of tiles ({GROUP} fit any width), without in_splits"
                )
            form = states(layout) if layout.trainable and states is not None else None
            for kind in form.states if isinstance(form, StateFormat) else ():
                if problem := block_problem(slot.name, piece, kind):
                    raise ModelError(
                        f"infinity.moments is '8bit', and {problem}. Let max_bytes choose the rows of tiles, without "
                        f"in_splits ({kind.per} rows fit any width), or use moments in bf16 or fp32"
                    )


def block_problem(name: str, piece: Piece, kind: StateKind) -> str | None:
    """Return the problem, for an error, if a tile cuts blocks of elements that share a value of a state; else None."""
    if not piece.place or kind.per == 1 or piece.blocks(kind.per) is not None:
        return None
    return (
        f"{name}, a tile of {piece.name}, begins or ends within one of its blocks of {kind.per} elements with a scale"
    )
