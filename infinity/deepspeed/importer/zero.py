"""Finds every parameter's states in the files of a DeepSpeed checkpoint of ZeRO stages 1 to 3.

Stages 1 and 2, and its bf16 optimizer: the parameters of a group follow one another in one flat fp32 tensor, and each
rank's file holds an equal part of it. Stage 3: each rank's file holds its part of every parameter, one after another,
in flat tensors of sub-groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import Any

from infinity.deepspeed.importer.files import FileTensor, Inert, PickleFile, read_pickle
from infinity.deepspeed.importer.model import TENSOR_PARALLEL, ModelStates, frozen, read_model_states
from infinity.deepspeed.importer.states import (
    DAMAGED,
    Range,
    StoredCheckpoint,
    StoredParameter,
    StoredState,
    check_numel,
    entry,
    inside,
    loss_scaler,
    numbers_of,
    part_of,
    step_of,
)
from infinity.deepspeed.importer.unsharded import read_unsharded
from infinity.errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MASTERS = {True: "fp32_flat_groups", False: "single_partition_of_fp32_groups"}
"""Key of the flat masters; True for stage 3."""


def read_zero(folder: Path) -> StoredCheckpoint:
    """Return the checkpoint in `folder`, of stages 0 to 3. Reads no values of parameters.

    Raises CheckpointError if a file is missing, sizes do not add up, or the checkpoint uses an unsupported
    feature of DeepSpeed.
    """
    models = read_model_states(folder)
    files = _optimizer_files(folder)
    if not files:
        return read_unsharded(folder, models[0])
    states = [_State(read_pickle(path), len(files)) for path in files]
    _check_alike(states)
    sharded = states[0].stage == 3
    if sharded != models[0].by_rank or (sharded and len(models) != len(states)):
        raise CheckpointError(
            f"{folder} holds {len(states)} files of the optimizer in stage {states[0].stage} and {len(models)} of the "
            "model: copy the files of all ranks of one checkpoint into an empty folder"
        )
    trained = dict((_of_stage3 if sharded else _of_flat_groups)(models[0], states))
    parameters = {**frozen(models), **trained}
    return models[0].checkpoint(parameters, states[0].param_groups, loss_scaler(states[0].content))


class _State:
    """The file of one rank's optimizer."""

    def __init__(self, file: PickleFile, ranks: int) -> None:
        self.file = file
        self.content = entry(file.content, "optimizer_state_dict", dict, file.path)
        self.stage = _stage(self.content, file.path)
        counts = self.content.get("partition_count")
        counts = counts if isinstance(counts, (list, tuple)) else [counts]
        if any(count != ranks for count in counts):
            raise CheckpointError(
                f"{file.path} was saved by {' or '.join(map(str, dict.fromkeys(counts)))} ranks, and there are files "
                f"of {ranks}: copy all files of one run (experts over fewer ranks cannot be imported)"
            )
        self.masters = [
            file.place(value, f"master of group {number}")
            for number, value in enumerate(entry(self.content, _MASTERS[self.stage == 3], (list, tuple), file.path))
        ]
        base = self.content.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        self.param_groups: list[dict[str, Any]] = []
        if isinstance(base, list):  # of "elastic" checkpoints
            found, steps = base, [self.content.get("base_optimizer_state_step")] * len(base)
        else:
            states = entry(base, "state", dict, file.path)
            self.param_groups = entry(base, "param_groups", list, file.path)
            listed = numbers_of(self.param_groups, file.path)
            found, steps = [states.get(number, {}) for _, number in listed], [group.get("step") for group, _ in listed]
        if len(found) != len(self.masters) or not all(isinstance(state, dict) for state in found):
            raise CheckpointError(
                f"{file.path} holds the masters of {len(self.masters)} groups and the moments of {len(found)}: "
                f"{DAMAGED}"
            )
        self.moments = [{name: value for name, value in state.items() if value is not None} for state in found]
        """Moments of each flat tensor, in the order of the masters."""
        steps = [moments.pop("step", step) for moments, step in zip(self.moments, steps, strict=True)]
        self.steps = [None if step is None else step_of(step, file) for step in steps]
        """Step of each flat tensor, which optimizers save with its moments or with its group."""


def _stage(content: Any, path: Path) -> int:
    stage = content.get("zero_stage", 1)  # the bf16 optimizer, of stage 1, does not save it
    if isinstance(stage, Inert) and len(stage.arguments) == 1:
        stage = stage.arguments[0]
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{path}: zero_stage is {stage!r}, and 1, 2 or 3 is expected: {DAMAGED}")
    return int(stage)


def _optimizer_files(folder: Path) -> list[Path]:
    """Return the optimizer's files in the order of ranks."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        matched = _OPTIMIZER_FILE.fullmatch(path.name)
        if matched is None:
            continue
        rank, model_rank = int(matched[1]), int(matched[2])
        if model_rank:
            raise CheckpointError(f"{path} {TENSOR_PARALLEL}")
        if rank in found:
            raise CheckpointError(f"{path}: rank {rank} has another file, {found[rank].name}: remove the stale one")
        found[rank] = inside(folder, path.name)
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        raise CheckpointError(
            f"{folder} lacks the optimizer's file of rank {', '.join(map(str, missing))}: copy the files of all ranks"
        )
    return [found[rank] for rank in sorted(found)]


def _check_alike(states: Sequence[_State]) -> None:
    first = states[0]
    for state in states[1:]:
        own = (state.stage, len(state.masters), state.steps, [sorted(moments) for moments in state.moments])
        if own != (first.stage, len(first.masters), first.steps, [sorted(moments) for moments in first.moments]):
            raise CheckpointError(
                f"{state.file.path} differs from {first.file.path.name} in stage, groups, steps or moments: copy one "
                "checkpoint's files into an empty folder"
            )
        for what, mine, theirs in (
            ("constants of param_groups", _plain(state.param_groups), _plain(first.param_groups)),
            ("loss scales", _plain([loss_scaler(state.content)]), _plain([loss_scaler(first.content)])),
        ):
            if mine != theirs:
                raise CheckpointError(
                    f"{state.file.path} and {first.file.path.name} have different {what}: files of several steps or "
                    "runs are mixed, copy all files of one checkpoint again"
                )


def _plain(mappings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries that are numbers or text, which ranks share."""
    kinds = (int, float, str)
    return [{key: value for key, value in each.items() if isinstance(value, kinds)} for each in mappings]


def _of_flat_groups(model: ModelStates, states: Sequence[_State]) -> Iterator[tuple[str, StoredParameter]]:
    """Yield the trained parameters of stages 1 and 2."""
    path, groups = model.file.path, model.shapes
    if len(groups) != len(states[0].masters):
        raise CheckpointError(
            f"{path} names parameters of {len(groups)} groups, and {states[0].file.path.name} holds "
            f"{len(states[0].masters)}: {DAMAGED}"
        )
    paddings = states[0].content.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for number, group in enumerate(groups):
        flats = {"master": [state.masters[number] for state in states]}
        for name in states[0].moments[number]:
            flats[name] = [_lean(state, number, name) for state in states]
        gaps = paddings[number] if len(paddings) == len(groups) else []
        if len(gaps) != len(group) or not all(isinstance(gap, int) and gap >= 0 for gap in gaps):
            raise CheckpointError(
                f"{path} names {len(group)} parameters in group {number}, and param_alignment_paddings of "
                f"{states[0].file.path.name} has others: {DAMAGED}"
            )
        needed = sum(prod(shape) for shape in group.values()) + sum(gaps)
        held, unit = sum(flat.numel for flat in flats["master"]), 2 * len(states)
        if not needed <= held <= ceil(needed / unit) * unit:
            raise CheckpointError(
                f"{model.folder}: the parameters of group {number} have {needed:,} elements, and the files of "
                f"{len(states)} ranks hold {held:,}: {DAMAGED}"
            )
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            found = {}
            for kind, parts in flats.items():
                computed = model.computed(name) if kind == "master" else None
                state = StoredState(_cut(parts, at, at + prod(shape)), shape, computed)
                found[kind] = check_numel(state, f"{kind} of {name}", path)
            yield name, StoredParameter(shape, model.dtype(name), found, states[0].steps[number])
            at += prod(shape) + gap


def _lean(state: _State, number: int, name: str) -> FileTensor:
    """Return a rank's part of a moment without the padding at its end, so that it is as long as the master's part."""
    moment = state.file.place(state.moments[number][name], f"{name} of group {number}")
    master, paddings = state.masters[number], state.content.get("group_paddings") or []
    padding = paddings[number] if len(paddings) == len(state.masters) else 0
    if len(moment.shape) != 1 or moment.numel not in (master.numel, master.numel + padding):
        raise CheckpointError(
            f"{state.file.path}: {name} of group {number} has shape {list(moment.shape)}, and its masters "
            f"{list(master.shape)}: {DAMAGED}"
        )
    return FileTensor(moment.file, moment.at, moment.dtype, master.shape, master.stride)


def _cut(tensors: Sequence[FileTensor], start: int, stop: int) -> tuple[Range, ...]:
    """Return the ranges of elements [start, stop) of the concatenated flat tensors."""
    ranges, first = [], 0
    for tensor in tensors:
        own = Range(tensor, max(start - first, 0), min(stop - first, tensor.numel))
        if own.start < own.stop:
            ranges.append(own)
        first += tensor.numel
    return tuple(ranges)


def _of_stage3(model: ModelStates, states: Sequence[_State]) -> Iterator[tuple[str, StoredParameter]]:
    """Yield the trained parameters of stage 3."""
    path, ranks = model.file.path, len(states)
    parts = {name: ceil(prod(shape) / ranks) for group in model.shapes for name, shape in group.items()}
    flats = [_flats_of_rank(state) for state in states]
    for state, own in zip(states, flats, strict=True):
        held = sum(flat.numel for flat in own["master"])
        if held != sum(parts.values()):
            raise CheckpointError(
                f"{state.file.path} holds {held:,} elements of masters, and this rank's part of the model has "
                f"{sum(parts.values()):,}: {DAMAGED}"
            )
    ends = list(accumulate(flat.numel for flat in flats[0]["master"]))
    at = 0
    for name, shape in ((name, shape) for group in model.shapes for name, shape in group.items()):
        group = next((number for number, end in enumerate(ends) if at < end), len(ends) - 1)
        found = {}
        for kind in flats[0]:
            ranges: list[Range] = []
            for rank, own in enumerate(flats):
                ranges += _cut(own[kind], at, at + part_of(prod(shape), rank, ranks))
            found[kind] = check_numel(StoredState(tuple(ranges), shape), f"{kind} of {name}", path)
        yield name, StoredParameter(shape, model.dtype(name), found, states[0].steps[group])
        at += parts[name]


def _flats_of_rank(state: _State) -> dict[str, list[FileTensor]]:
    """Return state → flat tensors of a rank's sub-groups. Raises CheckpointError if they are not equally long."""
    names = set(state.moments[0]) if state.moments else set()
    found = {"master": state.masters}
    for name in sorted(names):
        found[name] = [
            state.file.place(moments.get(name), f"{name} of sub-group {number}")
            for number, moments in enumerate(state.moments)
        ]
        for number, (moment, master) in enumerate(zip(found[name], state.masters, strict=True)):
            if moment.shape != master.shape:
                raise CheckpointError(
                    f"{state.file.path}: {name} of sub-group {number} has shape {list(moment.shape)}, and its masters "
                    f"{list(master.shape)}: {DAMAGED}"
                )
    if any(set(moments) != names for moments in state.moments):
        raise CheckpointError(f"{state.file.path}: sub-groups have different moments: {DAMAGED}")
    return found
