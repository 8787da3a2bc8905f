"""Loads saved states: compares them with the model before any change, then streams them into the tiers unit by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.format import Entry, SavedStatesOf, own_states, persistent_buffers
from infinity.checkpoint.saved import SavedStates
from infinity.checkpoint.snapshot import ModelParts, Run, block_problem, check_settings
from infinity.comm.dtensor import is_distributed
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece
from infinity.optim.cpu_adam import split_master
from infinity.optim.moments import convert_moments, rounding_key
from infinity.plan.formats import StateKind
from infinity.plan.layout import Slot, UnitLayout
from infinity.tiers.freed import return_freed_memory
from infinity.units.states import Flats
from infinity.units.unit import Unit


class Loading:
    """Saved states that have been checked against an engine. Constructor and `apply` are collective. No save and no
    commit may be under way, since `apply` writes to the tiers that they read.

    run: None for an inference engine, which loads parameters and buffers only. verify: first compare all files with
    their checksums. load_rng: also read the RNG states, if the number of ranks is the same as at the save. Units,
    tiers, tile size, number of ranks and the formats of master and moments may differ. optimizer: also load moments and
    step counts; otherwise the present ones stay. strict: raise CheckpointError if the model and the saved states have
    different parameters; otherwise those that one lacks are ignored. Raises RanksError or CheckpointError before any
    change.
    """

    def __init__(
        self,
        parts: ModelParts,
        model: nn.Module,
        run: Run | None,
        saved: SavedStates,
        *,
        verify: bool,
        load_rng: bool,
        optimizer: bool,
        strict: bool,
    ) -> None:
        self._parts, self._run, self._saved, self._optimizer = parts, run, saved, optimizer
        self.index, self._folder = saved.index, saved.path
        self._pieces = saved.pieces(parts.units, model)
        self._check_parameters(strict=strict)
        if optimizer:
            assert run is not None
            self._check_optimizer(run)
        saved.check(parts.ranks, verify=verify)
        self._buffers = match_buffers(model, saved.buffers(), saved.path)
        self.client_state = saved.client_state()
        self._generators = saved.generators(parts.ranks) if load_rng else None

    def apply(self) -> None:
        """Replace the states of all units and the buffers, a part of one unit at a time."""
        parts = self._parts
        for unit in parts.units:
            layout = unit.layout
            if layout.windows or any(map(is_distributed, unit.parameters)):
                parts.states.write(layout, self._read(unit))
            else:
                for start, stop in parts.states.ranges(layout):
                    parts.states.write_range(layout, start, stop, self._read_range(unit, start, stop))
            return_freed_memory()
            if self._optimizer:
                saved = [self._entry(slot) for slot in unit.layout.slots]
                pairs = zip(saved, unit.steps, strict=True)
                unit.steps = [step if entry is None else entry.step for entry, step in pairs]
            unit.rewritten()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        parts.runner.refresh_viewed()
        parts.ranks.barrier()

    def restore_rng(self) -> None:
        """Restore the RNG states, if they were read."""
        if self._generators is not None:
            rng.restore_states(self._generators, self._parts.device.torch_device)

    def _entry(self, slot: Slot) -> Entry | None:
        return self.index.parameters.get(self._pieces[slot.name].name)

    def _read(self, unit: Unit) -> Flats:
        """Return the unit's states: the present ones, in which those of saved parameters are replaced."""
        layout, states = unit.layout, self._parts.states
        flats = states.empty(layout) if self._replaces_all(layout) else states.read(layout)
        for number, (slot, parameter) in enumerate(zip(layout.slots, unit.parameters, strict=True)):
            if (entry := self._entry(slot)) is None:
                continue
            updates = entry.step if self._optimizer else unit.steps[number]
            kinds = states.kinds(layout, number, updates)
            local = states.of_slot(layout, flats, number, updates)
            if self._optimizer:
                self._read_states(layout, slot, parameter, entry, kinds, local)
            else:
                self._read_value(parameter, self._pieces[slot.name], entry, local[kinds[0].name])
        return flats

    def _read_range(self, unit: Unit, start: int, stop: int) -> Flats:
        """Return the states of elements [start, stop) of this rank's shard: the present ones, in which those of saved
        parameters are replaced. All parameters are whole, and a native rule updates them.
        """
        layout, states = unit.layout, self._parts.states
        replaced = self._replaces_all(layout)
        own = states.zeros(layout, stop - start) if replaced else states.read_own(layout, start, stop)
        low = layout.shard_range(self._parts.ranks.shard_rank)[0] + start
        for number, begin, end in layout.slots_in(low, low + stop - start):
            slot = layout.slots[number]
            if (entry := self._entry(slot)) is None:
                continue
            kinds = states.kinds(layout)
            local = {kind.name: own[kind.name][kind.part(begin - low, end - low)] for kind in kinds}
            piece, bounds = self._pieces[slot.name], (begin - slot.offset, end - slot.offset)
            if self._optimizer:
                saved = self._saved.read_range(piece, self.index.kinds(piece.name), *bounds)
                self._convert(layout, entry, saved, local, first=layout.first + begin)
            else:
                kind = self.index.kinds(piece.name)[0]
                value = self._saved.read_range(piece, [kind], *bounds)[kind.name]
                target = local[kinds[0].name]
                target.copy_(self._rounded(value, target, entry))
        return own

    def _replaces_all(self, layout: UnitLayout) -> bool:
        """Return whether nothing of a unit's present states stays."""
        return all(map(self._entry, layout.slots)) and (self._optimizer or not layout.trainable)

    def _read_states(
        self,
        layout: UnitLayout,
        slot: Slot,
        parameter: nn.Parameter,
        entry: Entry,
        kinds: Sequence[StateKind],
        local: Flats,
    ) -> None:
        """Read all states of a parameter into `local`, converted to the engine's formats. kinds: those formats."""
        piece = self._pieces[slot.name]
        saved, whole = self._saved.read(piece, self.index.kinds(piece.name)), local
        if is_distributed(parameter):
            whole = {kind.name: torch.zeros(kind.shape_in(entry.shape), dtype=kind.dtype) for kind in kinds}
        if slot.record is not None:
            for name, target in whole.items():
                target.copy_(saved[name])
        else:
            self._convert(layout, entry, saved, whole, first=layout.first + slot.offset)
        if whole is not local:
            for name, target in local.items():
                target.copy_(self._parts.ranks.model.part(parameter, whole[name]))

    def _convert(self, layout: UnitLayout, entry: Entry, saved: Flats, target: Flats, *, first: int) -> None:
        """Fill `target`, states of a native rule, from `saved`. first: index of their first element in the model."""
        run = self._run
        assert run is not None
        same = saved.keys() == target.keys() and self.index.moments == run.config.infinity.moments
        if not layout.trainable or same:
            for name, values in target.items():
                values.copy_(saved[name])
        else:
            target["master"].copy_(saved["master"])
            rounding = rounding_key(run.config.infinity.seed, entry.step)
            convert_moments(run.config.optimizer.rule, saved, target, key=rounding, first=first)

    def _read_value(self, parameter: nn.Parameter, piece: Piece, entry: Entry, target: torch.Tensor) -> None:
        """Read a parameter's most precise value into `target`: the master, or the parameter itself if it was frozen."""
        kind = self.index.kinds(piece.name)[0]
        value = self._rounded(self._saved.read(piece, [kind])[kind.name], target, entry)
        target.copy_(self._parts.ranks.model.part(parameter, value))

    def _rounded(self, value: torch.Tensor, target: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return a saved value as the dtype of `target` takes it."""
        # Masters are rounded as in training. Inference casts what was frozen, as `to(torch.bfloat16)` does.
        if target.dtype == torch.bfloat16 and value.dtype == torch.float32 and (self._run or entry.trainable):
            return split_master(value)[0]
        return value

    def _check_parameters(self, *, strict: bool) -> None:
        """Raise CheckpointError if shapes differ, or with optimizer states if other parameters are trained. strict:
        also if names differ.
        """
        saved = self.index.parameters
        expected = {
            self._pieces[slot.name].name: (self._pieces[slot.name].shape, unit.layout)
            for unit in self._parts.units
            for slot in unit.layout.slots
        }
        problems = []
        if strict:
            problems = [f"{name} is in the model only" for name in expected if name not in saved]
            problems += [f"{name} is in the checkpoint only" for name in saved if name not in expected]
        for name, (shape, layout) in expected.items():
            entry = saved.get(name)
            if entry is None:
                continue
            if entry.shape != shape:
                problems.append(
                    f"{name} has shape {list(shape)} in the model and {list(entry.shape)} in the checkpoint"
                )
            elif not _converts(entry.torch_dtype, layout.dtype):
                problems.append(f"{name} is {layout.dtype} in the model and {entry.torch_dtype} in the checkpoint")
            elif self._optimizer and entry.trainable != layout.trainable:
                problems.append(
                    f"{name} is {'trained' if layout.trainable else 'frozen'} in the model and not so in the checkpoint"
                )
        if problems:
            shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
            raise CheckpointError(f"{self._folder} is a checkpoint of another model: {shown}")

    def _check_optimizer(self, run: Run) -> None:
        """Raise CheckpointError if optimizer, groups or settings differ, or if tiles cut blocks of 8-bit moments."""
        index, folder, groups = self.index, self._folder, len(run.progress.param_groups)
        if (index.optimizer, len(index.param_groups)) != (run.config.optimizer.type, groups):
            raise CheckpointError(
                f"{folder} was saved with {index.optimizer} and {len(index.param_groups)} param_groups, and this "
                f"engine has {run.config.optimizer.type} and {groups}: use the same optimizer and groups"
            )
        check_settings(run, index, folder)
        trained = (unit.layout for unit in self._parts.units if unit.layout.trainable)
        present = {self._pieces[slot.name].name: slot.group for layout in trained for slot in layout.slots}
        saved = {name: entry.group for name, entry in index.parameters.items() if entry.group is not None}
        # A parameter that has changed its group would get the hyper-parameters of another one.
        moved = [name for name in present if saved.get(name, present[name]) != present[name]]
        if moved:
            name = moved[0]
            raise CheckpointError(
                f"{folder} was saved with other param_groups: {name} is in group {saved[name]} there and in group "
                f"{present[name]} here ({len(moved)} parameters differ). Pass the groups in the same order, or "
                "load_optimizer_states=False"
            )
        slots = [
            slot for layout in (u.layout for u in self._parts.units if u.layout.trainable) for slot in layout.slots
        ]
        for slot in slots:
            entry = self._entry(slot)
            expected = None if entry is None or slot.record is None else own_states(slot.record.kinds(entry.step))
            if entry is not None and entry.states != expected:
                raise CheckpointError(
                    f"{folder} has other states of {slot.name} ({_named(entry.states)}) than this engine's optimizer "
                    f"({_named(expected)}): use the same optimizer and groups, or load_optimizer_states=False"
                )
        for name, piece in self._pieces.items():
            for kind in index.kinds(piece.name) if piece.name in index.parameters else ():
                if problem := block_problem(name, piece, kind):
                    raise CheckpointError(
                        f"{folder} has 8-bit moments, and {problem}: use other tiles, a checkpoint with moments in "
                        "bf16 or fp32, or load_optimizer_states=False"
                    )


def _named(states: SavedStatesOf | None) -> str:
    """Return the states of an entry for an error."""
    if states is None:
        return "those of a native rule"
    return ", ".join(name for name, _, _ in states) or "none"


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


def _converts(saved: torch.dtype, present: torch.dtype) -> bool:
    """Return whether values in `saved` may be rounded to `present`: codes of a quantised parameter may not."""
    return saved == present or all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (saved, present))
