"""Finds every parameter's states in a universal checkpoint, as DeepSpeed's ds_to_universal writes it.

The folder `zero` holds a folder for each parameter, named after it, with fp32.pt, one file for each moment and, before
stage 3, step.pt. The files of the model's states are copies of those of the original checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from infinity.deepspeed.importer.files import FileTensor, read_pickle
from infinity.deepspeed.importer.model import read_model_states
from infinity.deepspeed.importer.states import (
    DAMAGED,
    Computed,
    StoredCheckpoint,
    StoredParameter,
    StoredState,
    check_numel,
    entry,
    inside,
    numbers_of,
    step_of,
)
from infinity.deepspeed.importer.zero import frozen, loss_scaler
from infinity.errors import CheckpointError
from infinity.units.compiled import own_name

FOLDER = "zero"
_OPTIMIZER = "optimizer_state.pt"
_MASTER, _STEP = "fp32", "step"


def is_universal(folder: Path) -> bool:
    return (folder / FOLDER / _OPTIMIZER).is_file()


def read_universal(folder: Path) -> StoredCheckpoint:
    """Return the universal checkpoint in `folder`. Reads no values of parameters.

    Raises CheckpointError if a file is missing or sizes do not add up.
    """
    models = read_model_states(folder)
    model, zero = models[0], inside(folder, FOLDER)
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
