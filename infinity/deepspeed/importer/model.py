"""Reads the files *_model_states.pt of a DeepSpeed checkpoint: names, shapes, buffers and progress.

Stages 0 to 2 write one such file, with the values that the model computes with. Stage 3 writes one for each rank, with
empty parameters and the rank's parts of frozen ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from infinity.deepspeed.importer.files import FileTensor, PickleFile, read_pickle
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
    part_of,
    shape_of,
    shapes_of,
)
from infinity.errors import CheckpointError
from infinity.units.compiled import own_name

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_CANNOT = "which Infinity cannot import: save its state_dict from DeepSpeed, and load that before infinity.initialize"
TENSOR_PARALLEL = (
    "belongs to a tensor parallel rank, which Infinity cannot import: save the whole model with one tensor parallel "
    "rank first"
)
_OTHER_FILES = {
    re.compile(r"layer_\d+_expert_.*|expert_\d+_.*|expp_rank_.*"): "experts (MoE)",
    re.compile(r"layer_\d+-model_.*"): "a pipeline",
}


_COUNTS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
"""Counts that are equal in the files of all ranks."""


@dataclass(frozen=True)
class ModelStates:
    """One file of the model's states."""

    folder: Path
    file: PickleFile
    by_rank: bool
    """True for stage 3, where each rank has a file."""
    module: Mapping[str, torch.Tensor]
    """Name → value, without data, in the order of the model's state_dict."""
    shapes: list[dict[str, tuple[int, ...]]]
    """Trained parameters by group; empty in stage 0."""
    frozen_shapes: dict[str, tuple[int, ...]]
    buffer_names: tuple[str, ...]
    aliases: dict[str, str]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter computes."""
        if name not in self.module:
            raise CheckpointError(f"{self.file.path}: parameter {name} is missing in 'module': {DAMAGED}")
        return self.module[name].dtype

    def place(self, name: str) -> FileTensor:
        return self.file.place(self.module[name], name)

    def computed(self, name: str) -> Computed | None:
        """Return the values that a parameter computes with; None in stage 3, which saves none."""
        if self.by_rank or name not in self.module:
            return None
        return Computed(name, self.place(name))

    def untrained(self) -> dict[str, FileTensor]:
        """Return the parameters in the file that are in no group of the optimizer. Not for stage 3."""
        trained = {name for group in self.shapes for name in group}
        others = trained | set(self.buffer_names) | self.aliases.keys()
        found = {name: self.place(name) for name in self.module if name not in others}
        if self.frozen_shapes and self.frozen_shapes.keys() != found.keys():
            odd = sorted(self.frozen_shapes.keys() ^ found.keys())
            raise CheckpointError(
                f"{self.file.path}: {odd[0]} is frozen but has no values, or is neither trained nor frozen: {DAMAGED}"
            )
        return found

    def fragment(self, name: str) -> FileTensor:
        """Return this rank's part of a frozen parameter in stage 3."""
        fragments = entry(self.file.content, "frozen_param_fragments", dict, self.file.path)
        by_name = {own_name(str(key)): value for key, value in fragments.items()}
        return self.file.place(by_name.get(name), f"the part of {name}")

    def checkpoint(
        self,
        parameters: dict[str, StoredParameter],
        param_groups: list[dict[str, Any]],
        loss_scale: Mapping[str, Any],
    ) -> StoredCheckpoint:
        """Return the whole checkpoint. Raises CheckpointError unless every name of the state_dict is accounted for."""
        buffers = {name: self.place(name) for name in self.buffer_names if name in self.module}
        known = parameters.keys() | buffers.keys() | self.aliases.keys()
        lost = [name for name in self.module if name not in known]
        lost += [name for name in parameters if name not in self.module]
        if lost:
            raise CheckpointError(
                f"{self.file.path}: {lost[0]} is in only one of 'module' and the trained or frozen parameters: "
                f"{DAMAGED}"
            )
        for name, parameter in parameters.items():
            shape = tuple(self.module[name].shape)
            if not self.by_rank and shape != parameter.shape:
                raise CheckpointError(
                    f"{self.file.path}: {name} has shape {list(shape)} in 'module' and {list(parameter.shape)} in "
                    f"'param_shapes': {DAMAGED}"
                )
        progress = {key: value for key, value in self.file.content.items() if key not in ("module", "optimizer")}
        aliases = {alias: name for alias, name in self.aliases.items() if name in parameters}
        return StoredCheckpoint(
            self.folder, parameters, tuple(self.module), buffers, aliases, param_groups, progress, loss_scale, self.file
        )


def read_model_states(folder: Path) -> list[ModelStates]:
    """Return the files of the model's states: of all ranks in stage 3, else one."""
    found: dict[tuple[bool, int], Path] = {}
    for path in sorted(folder.iterdir()):
        for pattern, what in _OTHER_FILES.items():
            if pattern.fullmatch(path.name):
                raise CheckpointError(f"{path} belongs to a model with {what}, {_CANNOT}")
        matched = _MODEL_FILE.fullmatch(path.name)
        if matched is None:
            continue
        if int(matched[2]):
            raise CheckpointError(f"{path} {TENSOR_PARALLEL}")
        found[matched[1] is not None, int(matched[1] or 0)] = inside(folder, path.name)
    kinds, ranks = {by_rank for by_rank, _ in found}, sorted(rank for _, rank in found)
    if not found:
        raise CheckpointError(f"{folder} holds no *_model_states.pt: copy all files of the checkpoint")
    if len(kinds) > 1 or ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"{folder} holds files of two checkpoints, or lacks a rank's model states: copy one checkpoint's files "
            f"into an empty folder. It holds {', '.join(path.name for path in found.values())}."
        )
    models = [_model_states(folder, read_pickle(found[key]), by_rank=key[0]) for key in sorted(found)]
    saved_by = models[0].file.content.get("dp_world_size")
    if models[0].by_rank and isinstance(saved_by, int) and saved_by > len(models):
        raise CheckpointError(
            f"{folder} was saved by {saved_by} ranks, and holds the model's files of {len(models)}: files of ranks are "
            "missing, copy the files of all ranks"
        )
    for model in models[1:]:
        _check_alike(model, models[0])
    return models


def _check_alike(model: ModelStates, first: ModelStates) -> None:
    same = model.shapes == first.shapes and model.frozen_shapes == first.frozen_shapes
    if not same or list(model.module) != list(first.module):
        raise CheckpointError(
            f"{model.file.path} has other parameters than {first.file.path.name}: copy one checkpoint's files "
            "into an empty folder"
        )
    for count in _COUNTS:
        own, firsts = model.file.content.get(count), first.file.content.get(count)
        if own != firsts:
            raise CheckpointError(
                f"{model.file.path} has {count} {own!r}, and {first.file.path.name} {firsts!r}: files of "
                "several steps or runs are mixed, copy all files of one checkpoint again"
            )


def _model_states(folder: Path, file: PickleFile, *, by_rank: bool) -> ModelStates:
    content, path = file.content, file.path
    module = entry(content, "module", dict, path)
    odd = [name for name, value in module.items() if not isinstance(name, str) or not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(
            f"{path}: 'module' holds {odd[0]!r}, which is no tensor: save the model without get_extra_state()"
        )
    _check_supported(content, path)
    shapes = shapes_of(content, path) if content.get("param_shapes") is not None else []
    frozen, names = content.get("frozen_param_shapes") or {}, content.get("buffer_names") or []
    aliases = content.get("shared_params") or {}
    if not isinstance(frozen, dict) or not isinstance(names, list) or not isinstance(aliases, dict):
        raise CheckpointError(
            f"{path}: frozen_param_shapes, buffer_names or shared_params is of another type: {DAMAGED}"
        )
    return ModelStates(
        folder=folder,
        file=file,
        by_rank=by_rank,
        module={own_name(name): value for name, value in module.items()},
        shapes=[{own_name(name): shape for name, shape in group.items()} for group in shapes],
        frozen_shapes={own_name(str(name)): shape_of(shape, str(name), path) for name, shape in frozen.items()},
        buffer_names=tuple(own_name(str(name)) for name in names),
        aliases={own_name(str(alias)): own_name(str(name)) for alias, name in aliases.items()},
    )


def _check_supported(content: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if the model is sharded in other ways than by ZeRO."""
    ways = {
        "tensor or model parallelism (mp_world_size > 1)": content.get("mp_world_size") not in (None, 0, 1),
        "experts (num_experts)": bool(content.get("num_experts")),
        "experts (AutoEP)": bool(content.get("ds_autoep_layers") or content.get("autoep_layers")),
    }
    for way, used in ways.items():
        if used:
            raise CheckpointError(f"{path} belongs to a model with {way}, {_CANNOT}")


def frozen(models: Sequence[ModelStates]) -> dict[str, StoredParameter]:
    """Return the parameters that are not trained. models: of all ranks in stage 3, else of the only file."""
    first = models[0]
    if not first.by_rank:
        return {
            name: StoredParameter(tensor.shape, tensor.dtype, {"param": StoredState.whole(tensor)})
            for name, tensor in first.untrained().items()
        }
    found = {}
    for name, shape in first.frozen_shapes.items():
        ranges: list[Range] = []
        for rank, model in enumerate(models):
            fragment, valid = model.fragment(name), part_of(prod(shape), rank, len(models))
            if fragment.numel < valid or fragment.dtype != first.dtype(name):
                raise CheckpointError(
                    f"{model.file.path}: the part of {name} has shape {list(fragment.shape)} and {fragment.dtype}, and "
                    f"{valid:,} elements of {first.dtype(name)} are expected: {DAMAGED}"
                )
            ranges += [Range(fragment, 0, valid)] if valid else []
        state = check_numel(StoredState(tuple(ranges), shape), name, first.file.path)
        found[name] = StoredParameter(shape, first.dtype(name), {"param": state})
    return found
