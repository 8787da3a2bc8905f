"""Pretrained weights from a Hugging Face folder, read unit by unit into the tiers when an engine is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from infinity.checkpoint.format import persistent_buffers
from infinity.checkpoint.tensors import PART, WEIGHTS, WEIGHTS_INDEX, Spec, read_part, spec_of
from infinity.construction.materialize import make_buffers
from infinity.construction.sources import note_loaded, note_source
from infinity.errors import CheckpointError, UsageError
from infinity.observe.log import logger
from infinity.units.compiled import own_name, uncompiled
from infinity.units.hooks import UnitParameters

_SHOWN = 3


class Unmatched(NamedTuple):
    """Names of the model that the folder lacks, and names of the folder that the model lacks."""

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a safetensors file."""

    file: Path
    name: str
    spec: Spec

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of it flattened, (stop - start,), in the dtype it was saved in."""
        try:
            # Opened for each tensor, since what was read of a file stays mapped until it is closed.
            with safe_open(self.file, framework="pt") as tensors:
                return read_part(tensors, self.name, start, stop)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name} cannot be read from {self.file}: {error}") from None

    def copy_to(self, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(self.read(0, prod(self.spec.shape)).view(self.spec.shape))


def load_pretrained(model: nn.Module, folder: str | Path, *, strict: bool = True) -> Unmatched:
    """Give `model` the weights in `folder`, as `save_pretrained` or `infinity export` wrote them. Call it before
    `infinity.initialize`, on every rank alike.

    folder: holds model.safetensors, or its shards and model.safetensors.index.json. Parameters that are on the meta
    device are read when an engine is made of the model, or of one that contains it: unit by unit, every rank its
    shards; keep the folder till then. All others, and buffers, are read now. Names are those of the model's state_dict;
    a parameter that modules share may be there under any of its names. Values are cast to the model's dtypes; the
    masters of 16-bit parameters start as what is in the files.

    strict: CheckpointError if a name is missing or unexpected. Otherwise, what is missing is initialised as usual (or
    keeps the values that it has), and said. Wrong shapes, damaged files and shared parameters with several values are
    errors in any case; nothing has been changed then.
    """
    if any(isinstance(module._parameters, UnitParameters) for module in model.modules()):
        raise UsageError("the model belongs to an engine already: call load_pretrained before infinity.initialize")
    folder = Path(folder)
    saved = _saved_tensors(folder)
    targets = _targets(model)
    unmatched = _unmatched(model, targets, saved)
    problems = _misfits(targets, saved)
    if strict:
        problems += [f"{name} is in the model only" for name in unmatched.missing]
        problems += [f"{name} is in the folder only" for name in unmatched.unexpected]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        hint = " (strict=False loads the rest)" if strict and len(problems) == sum(map(len, unmatched)) else ""
        raise CheckpointError(f"{folder} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}{hint}")
    for names, target in targets.items():
        tensor = next((saved[name] for name in names if name in saved), None)
        if tensor is None:
            continue
        if not isinstance(target, nn.Parameter):
            _load_buffer(model, names[0], target, tensor)
        elif target.is_meta:
            note_source(target, tensor)
        else:
            tensor.copy_to(model.get_parameter(names[0]))  # read there, as infinity.Init keeps in memory what is used
    make_buffers(model)
    for what, names_left in unmatched._asdict().items():
        if names_left:
            logger.warning("load_pretrained(%s): %s: %s", folder, what, ", ".join(names_left))
    return unmatched


_Targets = dict[tuple[str, ...], torch.Tensor]
"""All names of a parameter or buffer → it."""


def _targets(model: nn.Module) -> _Targets:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    targets: _Targets = {tuple(names[id(parameter)]): parameter for parameter in model.parameters()}
    return targets | {(name,): buffer for name, buffer in persistent_buffers(model).items()}


def _load_buffer(model: nn.Module, name: str, buffer: torch.Tensor, tensor: SavedTensor) -> None:
    """One on the meta device becomes a real one."""
    if buffer.is_meta:
        buffer = torch.empty_like(buffer, device="cpu")
        path, _, own = name.rpartition(".")
        uncompiled(model.get_submodule(path))._buffers[own] = buffer
    tensor.copy_to(buffer)
    note_loaded(buffer)


def _unmatched(model: nn.Module, targets: _Targets, saved: Mapping[str, SavedTensor]) -> Unmatched:
    known = {name for names in targets for name in names}
    known |= {
        own_name(name) for name, _ in model.named_buffers()
    }  # some folders hold buffers that a state_dict leaves out
    missing = [names[0] for names in targets if not any(name in saved for name in names)]
    return Unmatched(missing, [name for name in saved if name not in known])


def _misfits(targets: _Targets, saved: Mapping[str, SavedTensor]) -> list[str]:
    problems = []
    for names, target in targets.items():
        there = [saved[name] for name in names if name in saved]
        for tensor in there:
            mine, theirs = Spec(target.dtype, tuple(target.shape)), tensor.spec
            if mine.shape != theirs.shape:
                shapes = f"{list(mine.shape)} in the model and {list(theirs.shape)} in the folder"
                problems.append(f"{tensor.name} has shape {shapes}")
            elif mine.dtype.is_floating_point != theirs.dtype.is_floating_point:
                problems.append(f"{tensor.name} is {mine.dtype} in the model and {theirs.dtype} in the folder")
        if len(there) > 1 and len({tensor.spec for tensor in there}) == 1 and not _same(there):
            problems.append(f"{' and '.join(tensor.name for tensor in there)} differ, and are one in the model")
    return problems


def _same(tensors: Sequence[SavedTensor]) -> bool:
    numel = prod(tensors[0].spec.shape)
    for start in range(0, numel, PART):
        first, *others = (tensor.read(start, min(start + PART, numel)) for tensor in tensors)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def _saved_tensors(folder: Path) -> dict[str, SavedTensor]:
    """What the folder holds; only the heads of its files are read."""
    if (folder / WEIGHTS).is_file():
        return _tensors_of(folder / WEIGHTS)
    index = folder / WEIGHTS_INDEX
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): str(file) for name, file in files.items()}
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}: name a folder on this machine that "
            "save_pretrained or `infinity export` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}): it is damaged") from None
    found: dict[str, SavedTensor] = {}
    for file in dict.fromkeys(named.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is no file beside it")
        found |= _tensors_of(folder / file)
    lost = [name for name in named if name not in found]
    if lost:
        raise CheckpointError(f"{index} names {lost[0]}, which {named[lost[0]]} does not hold: the folder is damaged")
    return found


def _tensors_of(file: Path) -> dict[str, SavedTensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: SavedTensor(file, name, spec_of(tensors, name)) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): it is missing or damaged") from None
