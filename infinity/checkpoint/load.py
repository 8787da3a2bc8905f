"""Loads saved states: compares them with the model before any change, then streams them into the tiers unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.format import Index, persistent_buffers, shape_of, view
from infinity.checkpoint.saved import PieceOf, SavedStates
from infinity.checkpoint.snapshot import ModelParts, Run, check_settings
from infinity.checkpoint.tiles import block_problem
from infinity.comm.dtensor import is_distributed
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece
from infinity.optim.cpu_adam import split_master
from infinity.optim.moments import convert_moments, rounding_key
from infinity.tiers.memory import return_freed_memory
from infinity.units.states import Flats, flat_tensor
from infinity.units.unit import Unit


class Loading:
    """Saved states that have been checked against an engine. Constructor and `apply` are collective. No save and no
    commit may be under way, since `apply` writes to the tiers that they read.

    verify: first compare all files with their checksums. load_rng: also read the RNG states, if the number of ranks is
    the same as at the save. Units, tiers, tile size, number of ranks and the formats of master and moments may differ.
    optimizer: also load moments and step counts; otherwise the present ones stay. strict: raise CheckpointError if the
    model and the saved states have different parameters; otherwise those that one lacks are ignored. Raises RanksError
    or CheckpointError before any change.
    """

    def __init__(
        self,
        parts: ModelParts,
        model: nn.Module,
        run: Run,
        saved: SavedStates,
        *,
        verify: bool,
        load_rng: bool,
        optimizer: bool = True,
        strict: bool = True,
    ) -> None:
        self._saved, self.index, folder = saved, saved.index, saved.path
        self._pieces = saved.pieces(parts.units, model)
        _check_parameters(parts.units, self._pieces, self.index, folder, trained=optimizer, strict=strict)
        if optimizer:
            _check_optimizer(run, self.index, folder)
            _check_groups(parts.units, self._pieces, self.index, folder)
            _check_blocks(self._pieces, self.index, folder)
        self._optimizer = optimizer
        saved.check(parts.ranks, verify=verify)
        self._buffers = match_buffers(model, saved.buffers(), saved.path)
        self.client_state = saved.client_state()
        self._generators = saved.generators(parts.ranks) if load_rng else None
        self._parts, self._run = parts, run

    def apply(self) -> None:
        """Replace the states of all units and the buffers, one unit at a time."""
        parts = self._parts
        for unit in parts.units:
            saved = [self.index.parameters.get(self._pieces[slot.name].name) for slot in unit.layout.slots]
            flats = self._read_unit(unit, complete=all(saved))
            parts.states.write(unit.layout, flats)
            del flats
            return_freed_memory()
            if self._optimizer:
                pairs = zip(saved, unit.steps, strict=True)
                unit.steps = [step if entry is None else entry.step for entry, step in pairs]
            parts.store.rewritten(unit)
        for buffer, value in self._buffers:
            buffer.copy_(value)
        parts.runner.refresh_viewed()
        parts.ranks.barrier()

    def _read_unit(self, unit: Unit, *, complete: bool) -> Flats:
        """Return the unit's states. complete: all of its parameters were saved."""
        if self._optimizer and complete:
            return _read(self._parts, self._run, self._saved, self._pieces, unit)
        flats = self._parts.states.read(unit.layout)
        if self._optimizer:
            return _read(self._parts, self._run, self._saved, self._pieces, unit, flats)
        _read_values(self._parts, self._saved, self._pieces, unit, flats)
        return flats

    def restore_rng(self) -> None:
        """Restore the RNG states, if they were read."""
        if self._generators is not None:
            rng.restore_states(self._generators, self._parts.device.torch_device)


def load_parameters(
    parts: ModelParts,
    model: nn.Module,
    saved: SavedStates,
    replacing: AbstractContextManager[None],
    *,
    strict: bool,
    verify: bool,
) -> dict[str, Any]:
    """Load parameters and buffers only, cast to the dtypes of the units. Return the client_state.

    replacing: entered before the first change. strict: raise CheckpointError if the model and the saved states have
    different parameters; otherwise those that one lacks are ignored. verify: first compare all files with their
    checksums. Raises CheckpointError before any change.
    """
    pieces = saved.pieces(parts.units, model)
    _check_parameters(parts.units, pieces, saved.index, saved.path, trained=False, strict=strict)
    saved.check(parts.ranks, verify=verify)
    buffers = match_buffers(model, saved.buffers(), saved.path)
    client_state = saved.client_state()
    with replacing:
        for unit in parts.units:
            parts.states.write(unit.layout, {"param": _read_parameters(parts, saved, pieces, unit)})
            return_freed_memory()
            parts.store.rewritten(unit)
        for buffer, value in buffers:
            buffer.copy_(value)
        parts.runner.refresh_viewed()
        parts.ranks.barrier()
    return client_state


def _check_parameters(
    units: Iterable[Unit], pieces: PieceOf, index: Index, folder: Path, *, trained: bool = True, strict: bool = True
) -> None:
    """Raise CheckpointError if shapes differ. trained: also if other parameters are trained. strict: also if names
    differ.
    """
    expected = {
        pieces[slot.name].name: (pieces[slot.name].shape, unit.layout.trainable)
        for unit in units
        for slot in unit.layout.slots
    }
    problems = []
    if strict:
        problems = [f"{name} is in the model only" for name in expected if name not in index.parameters]
        problems += [f"{name} is in the checkpoint only" for name in index.parameters if name not in expected]
    for name, (shape, trainable) in expected.items():
        entry = index.parameters.get(name)
        if entry is None:
            continue
        if entry.shape != shape:
            problems.append(f"{name} has shape {list(shape)} in the model and {list(entry.shape)} in the checkpoint")
        elif trained and entry.trainable != trainable:
            problems.append(
                f"{name} is {'trained' if trainable else 'frozen'} in the model and not so in the checkpoint"
            )
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise CheckpointError(f"{folder} is a checkpoint of another model: {shown}")


def _check_optimizer(run: Run, index: Index, folder: Path) -> None:
    kind, groups = run.optimizer, len(run.param_groups)
    if (index.optimizer, len(index.param_groups)) != (kind, groups):
        raise CheckpointError(
            f"{folder} was saved with {index.optimizer} and {len(index.param_groups)} param_groups, and this engine "
            f"has {kind} and {groups}: use the same optimizer and groups"
        )
    check_settings(run, index, folder)


def _check_groups(units: Iterable[Unit], pieces: PieceOf, index: Index, folder: Path) -> None:
    """Raise CheckpointError if a trained parameter was in another param_group, whose hyper-parameters it would get."""
    trained = (unit.layout for unit in units if unit.layout.trainable)
    present = {pieces[slot.name].name: slot.group for layout in trained for slot in layout.slots}
    saved = {name: entry.group for name, entry in index.parameters.items() if entry.group is not None}
    moved = [name for name in present if saved.get(name, present[name]) != present[name]]
    if moved:
        name = moved[0]
        raise CheckpointError(
            f"{folder} was saved with other param_groups: {name} is in group {saved[name]} there and in group "
            f"{present[name]} here ({len(moved)} parameters differ). Pass the groups in the same order, or "
            "load_optimizer_states=False"
        )


def _check_blocks(pieces: PieceOf, index: Index, folder: Path) -> None:
    """Raise CheckpointError if tiles cut the blocks of saved 8-bit moments."""
    for name, piece in pieces.items():
        for kind in index.kinds(piece.name) if piece.name in index.parameters else ():
            if problem := block_problem(name, piece, kind):
                raise CheckpointError(
                    f"{folder} has 8-bit moments, and {problem}: use other tiles, a checkpoint with moments in bf16 or "
                    "fp32, or load_optimizer_states=False"
                )


def match_buffers(
    model: nn.Module, values: Mapping[str, torch.Tensor], path: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs (buffer of the model, saved value). path: of the saved states, for messages.

    Raises CheckpointError if names or shapes differ, or if only one of both is of floating point.
    """
    buffers = persistent_buffers(model)
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in buffers.items()}:
        raise CheckpointError(f"{path} was saved from another model: its buffers have other names or shapes")
    for name, value in values.items():
        if value.is_floating_point() != buffers[name].is_floating_point():
            raise CheckpointError(
                f"{path} was saved from another model: its buffer {name} is {value.dtype}, and the model's is "
                f"{buffers[name].dtype}"
            )
    return [(buffers[name], value) for name, value in values.items()]


def _read(
    parts: ModelParts, run: Run, saved: SavedStates, pieces: PieceOf, unit: Unit, present: Flats | None = None
) -> Flats:
    """Return the unit's states, read for each of its parameters and converted to the engine's formats.

    present: the unit's states, in which those of saved parameters are replaced.
    """
    layout, index = unit.layout, saved.index
    kinds = parts.states.kinds(layout)
    flats = present or {kind.name: flat_tensor(kind.length(layout.numel), kind.dtype) for kind in kinds}
    for slot, parameter in zip(layout.slots, unit.parameters, strict=True):
        piece = pieces[slot.name]
        entry = index.parameters.get(piece.name)
        if entry is None:
            continue
        states = saved.read(piece, index.kinds(piece.name))
        local = {kind.name: view(kind, slot, flats[kind.name]) for kind in kinds}
        whole = local
        if is_distributed(parameter):
            whole = {kind.name: torch.zeros(shape_of(kind, entry.shape), dtype=kind.dtype) for kind in kinds}
        first = layout.first + slot.offset
        _fill(run, index, states, whole, as_it_is=not layout.trainable, step=entry.step, first=first)
        if whole is not local:
            for name, target in local.items():
                target.copy_(parts.ranks.model.part(parameter, whole[name]))
    return flats


def _read_values(parts: ModelParts, saved: SavedStates, pieces: PieceOf, unit: Unit, flats: Flats) -> None:
    """Replace the values of parameters in `flats`, the unit's states, and leave the moments."""
    kind = parts.states.kinds(unit.layout)[0]
    for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
        piece = pieces[slot.name]
        if piece.name not in saved.index.parameters:
            continue
        value = _value(saved, piece)
        if value.dtype == torch.float32 and kind.dtype == torch.bfloat16:
            value = split_master(value)[0]
        view(kind, slot, flats[kind.name]).copy_(parts.ranks.model.part(parameter, value))


def _value(saved: SavedStates, piece: Piece) -> torch.Tensor:
    """Return a parameter's most precise value: the master, or the parameter itself if it was frozen."""
    kind = saved.index.kinds(piece.name)[0]
    return saved.read(piece, [kind])[kind.name]


def _read_parameters(parts: ModelParts, saved: SavedStates, pieces: PieceOf, unit: Unit) -> torch.Tensor:
    """Return the unit's flat tensor (numel,) in its dtype: masters rounded as in training, frozen parameters cast."""
    layout, entries = unit.layout, saved.index.parameters
    complete = all(pieces[slot.name].name in entries for slot in layout.slots)
    flat = flat_tensor(layout.numel, layout.dtype) if complete else parts.states.read_param(layout)
    for slot, parameter in zip(layout.slots, unit.parameters, strict=True):
        piece = pieces[slot.name]
        if piece.name not in entries:
            continue
        value = _value(saved, piece)
        if saved.index.parameters[piece.name].trainable and layout.dtype == torch.bfloat16:
            value = split_master(value)[0]
        flat[slot.offset : slot.stop].view(slot.shape).copy_(parts.ranks.model.part(parameter, value))
    return flat


def _fill(run: Run, index: Index, saved: Flats, targets: Flats, *, as_it_is: bool, step: int, first: int) -> None:
    """Convert a parameter's saved states into `targets`. first: number of its first element in the model."""
    if as_it_is or (saved.keys() == targets.keys() and index.moments == run.moments):
        for name, target in targets.items():
            target.copy_(saved[name])
        return
    targets["master"].copy_(saved["master"])
    rounding = rounding_key(run.seed, step)
    convert_moments(run.rule, saved, targets, key=rounding, first=first)
