"""Finds every parameter's states in DeepSpeed checkpoints that hold them unsharded: of stage 0, and universal ones.

In stage 0 one file holds everything. Its optimizer's state names no parameter: states are in the order of the
optimizer's parameters. They are matched with the model's parameters in order, which is unambiguous for one param_group
of all parameters. Others raise an error.

DeepSpeed's ds_to_universal writes universal checkpoints. The folder `zero` holds a folder for each parameter, named
after it, with fp32.pt, one file for each moment and, before stage 3, step.pt. The files of the model's states are
copies of those of the original checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.tensors import PART
from infinity.deepspeed.importer.files import FileTensor, PickleFile, read_pickle
from infinity.deepspeed.importer.model import ModelStates, frozen, read_model_states
from infinity.deepspeed.importer.states import (
    DAMAGED,
    Computed,
    Range,
    StoredCheckpoint,
    StoredParameter,
    StoredState,
    check_numel,
    entry,
    inside,
    loss_scaler,
    numbers_of,
    step_of,
)
from infinity.errors import CheckpointError
from infinity.units.compiled import own_name

_FOLDER = "zero"
_OPTIMIZER = "optimizer_state.pt"
_MASTER, _STEP = "fp32", "step"
_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")


def read_unsharded(folder: Path, model: ModelStates) -> StoredCheckpoint:
    """Return a checkpoint of stage 0. Raises CheckpointError if states cannot be matched with parameters."""
    path = model.file.path
    if model.by_rank or model.shapes:
        raise CheckpointError(
            f"{folder} lacks the files of the optimizer (*_optim_states.pt): copy the files of all ranks"
        )
    optimizer = entry(model.file.content, "optimizer", dict, path)
    wrapped = "optimizer_state_dict" in optimizer  # by DeepSpeed's fp16 and bf16 optimizers without ZeRO
    base = entry(optimizer, "optimizer_state_dict", dict, path) if wrapped else optimizer
    groups = entry(base, "param_groups", list, path)
    if len(groups) != 1:
        raise CheckpointError(
            f"{path} is of stage 0 with {len(groups)} param_groups, and does not record which parameters they "
            "hold: save it with ZeRO stage 1 or higher"
        )
    model, tensors = _without_aliases(model)
    masters = _masters(optimizer, tensors, model.file) if wrapped else tensors
    numbers = entry(groups[0], "params", list, path)
    states = entry(base, "state", dict, path)
    flat = wrapped and "fp32_groups_flat" in optimizer
    if len(numbers) != (1 if flat else len(tensors)):
        raise CheckpointError(
            f"{path} is of stage 0 with {len(tensors)} parameters, and its optimizer has {len(numbers)}: frozen ones "
            "are not recorded there; save it with ZeRO stage 1 or higher"
        )
    parameters, start = {}, 0
    for place, (name, tensor) in enumerate(tensors.items()):
        state = states.get(numbers[0 if flat else place], {})
        found = {"master": StoredState.whole(masters[name], tensor.shape)}
        for key, value in state.items():
            if key != "step" and value is not None:
                found[key] = _moment(model.file, value, f"{key} of {name}", tensor.shape, start if flat else None)
        step = step_of(state["step"], model.file) if "step" in state else None
        parameters[name] = StoredParameter(tensor.shape, tensor.dtype, found, step)
        start += tensor.numel
    scale = {key: optimizer[key] for key in _SCALES if key in optimizer}
    return model.checkpoint(parameters, groups, scale)


def _without_aliases(model: ModelStates) -> tuple[ModelStates, dict[str, FileTensor]]:
    """Return the model with its aliases, and the parameters without them: stage 0 does not list shared ones.

    torch.save writes a shared tensor once, so that aliases are at the same place in the file.
    """
    tensors: dict[str, FileTensor] = {}
    first: dict[Any, str] = {}
    aliases = {}
    for name in model.module:
        if name in model.buffer_names:
            continue
        tensor = model.place(name)
        place = (tensor.at, tensor.shape, tensor.stride) if tensor.numel else name
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor
    return replace(model, aliases=aliases), tensors


def _masters(optimizer: Any, tensors: dict[str, FileTensor], file: PickleFile) -> dict[str, FileTensor]:
    """Return the fp32 masters by name. Raises CheckpointError unless they round to the model's values."""
    path = file.path
    if "fp32_groups_flat" in optimizer:
        (stored,) = entry(optimizer, "fp32_groups_flat", list, path)
        flat = file.place(stored, "fp32_groups_flat")
        found, at = {}, 0
        if flat.numel != sum(tensor.numel for tensor in tensors.values()) or not flat.is_contiguous:
            raise CheckpointError(
                f"{path} holds {flat.numel:,} elements of masters for {sum(t.numel for t in tensors.values()):,} of "
                "the model: frozen parameters are not recorded in stage 0; save it with ZeRO stage 1 or higher"
            )
        for name, tensor in tensors.items():
            place = flat.at + at * flat.dtype.itemsize
            found[name] = FileTensor(flat.file, place, flat.dtype, (tensor.numel,), (1,))
            at += tensor.numel
    else:
        (group,) = entry(optimizer, "fp32_groups", list, path)
        if not isinstance(group, (list, tuple)) or len(group) != len(tensors):
            raise CheckpointError(
                f"{path} holds other masters than the model's {len(tensors)} parameters: frozen ones are not recorded "
                "in stage 0; save it with ZeRO stage 1 or higher"
            )
        found = {name: file.place(value, f"master of {name}") for name, value in zip(tensors, group, strict=True)}
    for name, tensor in tensors.items():
        if found[name].numel != tensor.numel or not _rounds_to(found[name], Computed(name, tensor)):
            raise CheckpointError(
                f"{path}: from {name} on, the masters are in another order than the model's parameters: save it with "
                "ZeRO stage 1 or higher"
            )
    return found


def _rounds_to(master: FileTensor, computed: Computed) -> bool:
    starts = range(0, master.numel, PART)
    return all(computed.matches(master.read(at, min(at + PART, master.numel)), at) for at in starts)


def _moment(file: PickleFile, value: Any, name: str, shape: tuple[int, ...], start: int | None) -> StoredState:
    """Return a moment. start: its first element in the flat tensor of all parameters; None: it has a tensor."""
    tensor = file.place(value, name)
    if start is None and tensor.shape != shape:
        raise CheckpointError(
            f"{file.path}: {name} has shape {list(tensor.shape)}, and its parameter {list(shape)}: stage 0 does not "
            f"record names, so the optimizer has other parameters or another order: {DAMAGED}"
        )
    first = start or 0
    stop = first + prod(shape)
    if stop > tensor.numel:
        raise CheckpointError(f"{file.path}: {name} ends at {stop:,} of {tensor.numel:,} elements: {DAMAGED}")
    return StoredState((Range(tensor, first, stop),), shape)


def is_universal(folder: Path) -> bool:
    return (folder / _FOLDER / _OPTIMIZER).is_file()


def read_universal(folder: Path) -> StoredCheckpoint:
    """Return the universal checkpoint in `folder`. Reads no values of parameters.

    Raises CheckpointError if a file is missing or sizes do not add up.
    """
    models = read_model_states(folder)
    model, zero = models[0], inside(folder, _FOLDER)
    folders = {own_name(path.name): path.name for path in sorted(zero.iterdir()) if path.is_dir()}
    optimizer = read_pickle(inside(zero, _OPTIMIZER))
    groups = entry(optimizer.content, "param_groups", list, optimizer.path)
    steps = _steps_of_groups(optimizer.content, len(model.shapes), optimizer.path) if model.by_rank else []
    trained: dict[str, StoredParameter] = {}
    for number, group in enumerate(model.shapes):
        for name, shape in group.items():
            if name not in folders:
                raise CheckpointError(f"{zero} lacks the folder of parameter {name}: {DAMAGED}")
            own = inside(zero, folders[name])
            states, step = _states(own, name, shape, model.computed(name))
            if step is None and number < len(steps) and steps[number] is not None:
                step = step_of(steps[number], optimizer)
            trained[name] = StoredParameter(shape, model.dtype(name), states, step)
        if len({trained[name].step for name in group}) > 1:
            raise CheckpointError(
                f"{zero}: parameters of group {number} have different steps, which DeepSpeed counts once for all: "
                "folders of several checkpoints are mixed, convert the checkpoint again"
            )
    kinds = {tuple(sorted(parameter.states)): name for name, parameter in trained.items()}
    if len(kinds) > 1:
        raise CheckpointError(f"{zero}: {' and '.join(kinds.values())} have different moments: {DAMAGED}")
    return model.checkpoint({**frozen(models), **trained}, groups, loss_scaler(optimizer.content))


def _states(
    folder: Path, name: str, shape: tuple[int, ...], computed: Computed | None
) -> tuple[dict[str, StoredState], int | None]:
    """Return a parameter's states, and its number of updates if that is saved with it."""
    found, step = {}, None
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".pt"))
    if f"{_MASTER}.pt" not in files:
        raise CheckpointError(f"{folder} lacks {_MASTER}.pt, the master of {name}: {DAMAGED}")
    for file_name in files:
        state, file = file_name.removesuffix(".pt"), read_pickle(inside(folder, file_name))
        if state == _STEP:
            step = step_of(file.content, file)
            continue
        value: Any = file.content.get("param") if isinstance(file.content, dict) else file.content
        tensor: FileTensor = file.place(value, f"{state} of {name}")
        if tensor.shape not in (shape, (tensor.numel,)):
            raise CheckpointError(
                f"{file.path}: {state} of {name} has shape {list(tensor.shape)} instead of {list(shape)}: {DAMAGED}"
            )
        key = "master" if state == _MASTER else state
        whole = StoredState.whole(tensor, shape, computed if key == "master" else None)
        found[key] = check_numel(whole, f"{state} of {name}", file.path)
    return found, step


def _steps_of_groups(content: Any, groups: int, path: Path) -> list[int | torch.Tensor | None]:
    """Return the step of each sub-group in stage 3, as it is saved."""
    base = entry(content, "optimizer_state_dict", dict, path)
    states, counts = entry(base, "state", dict, path), []
    for group, number in numbers_of(entry(base, "param_groups", list, path), path):
        own = states.get(number, {})
        counts.append(own.get("step", group.get("step")) if isinstance(own, dict) else None)
    if len(counts) != groups:
        raise CheckpointError(f"{path} holds states of {len(counts)} sub-groups, and the model has {groups}: {DAMAGED}")
    return counts
