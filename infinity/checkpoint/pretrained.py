"""Pretrained weights from a Hugging Face folder, read unit by unit into the tiers when an engine is constructed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from infinity.checkpoint.converted import ConvertedTensor, converted
from infinity.checkpoint.format import names_of_buffers, persistent_buffers
from infinity.checkpoint.tensors import PART, WEIGHTS, WEIGHTS_INDEX, Spec, read_part, spec_of
from infinity.comm.side import Place
from infinity.construction.materialize import make_buffers, note_loaded, note_source
from infinity.errors import CheckpointError, UsageError
from infinity.inputs import is_file_name, open_input, parse_json, read_input
from infinity.model.hooks import UnitParameters
from infinity.nn.pieces import Piece, Pieces
from infinity.observe.log import logger
from infinity.units.compiled import own_name, uncompiled

_SHOWN = 3


class Unmatched(NamedTuple):
    """Names missing in the folder, and names in the folder that the model lacks."""

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a safetensors file, or the tile at `place` in it, with one slice for each dimension."""

    file: Path
    name: str
    spec: Spec
    """Dtype and shape of the whole tensor."""
    place: Place = ()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor or tile, (stop - start,), in its saved dtype."""
        try:
            # Opened for each tensor, since pages that were read stay mapped until the file is closed.
            with safe_open(self.file, framework="pt") as tensors:
                return read_part(tensors, self.name, start, stop, self.place)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.name} cannot be read from {self.file}: {error}") from None

    def copy_to(self, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(self.read(0, target.numel()).view(target.shape))


Saved = SavedTensor | ConvertedTensor


def load_pretrained(model: nn.Module, folder: str | Path, *, strict: bool = True) -> Unmatched:
    """Load the weights in `folder`, written by `save_pretrained` or `infinity export`, into `model`.

    Call it before `infinity.initialize`, on every rank. Returns the unmatched names.

    folder: holds model.safetensors, or its shards and model.safetensors.index.json. Parameters on the meta device are
    read when an engine of the model (or of a model that contains it) is constructed, unit by unit, on every rank its
    shards; keep the folder until then. Other parameters, and buffers, are read now. Names are the keys of the model's
    state_dict, or those that transformers' rules for the class convert to them, such as those of single experts. A
    shared parameter may be stored under any of its names. Values are cast to the model's dtypes. Masters of 16-bit
    parameters start with the values in the files.

    strict: raise CheckpointError if a name is missing or unexpected. Otherwise missing parameters are initialised as
    usual (or keep their values), and a warning lists them. Wrong shapes, damaged files and shared parameters with
    several values always raise CheckpointError. The model is unchanged after an error.
    """
    if any(isinstance(module._parameters, UnitParameters) for module in model.modules()):
        raise UsageError("the model already belongs to an engine: call load_pretrained before infinity.initialize")
    folder = Path(folder)
    targets = _targets(model)
    shapes = {name: target.shape for target in targets for name in target.names}
    saved = converted(model, shapes, _saved_tensors(folder))
    unmatched = _unmatched(model, targets, saved)
    problems = _misfits(targets, saved)
    if strict:
        problems += [f"{name} is in the model only" for name in unmatched.missing]
        problems += [f"{name} is in the folder only" for name in unmatched.unexpected]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        hint = " (strict=False loads the rest)" if strict and len(problems) == sum(map(len, unmatched)) else ""
        raise CheckpointError(f"{folder} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}{hint}")
    for target in targets:
        whole = next((saved[name] for name in target.names if name in saved), None)
        if whole is None:
            continue
        tensor = replace(whole, place=target.place)
        if not isinstance(target.tensor, nn.Parameter):
            _load_buffer(model, target.names, target.tensor, tensor)
        elif target.tensor.is_meta:
            note_source(target.tensor, tensor)
        else:
            # Through the module's attribute, since infinity.Init materializes parameters on access.
            tensor.copy_to(model.get_parameter(target.own))
    make_buffers(model)
    for what, names_left in unmatched._asdict().items():
        if names_left:
            logger.warning("load_pretrained(%s): %s: %s", folder, what, ", ".join(names_left))
    return unmatched


class _Target(NamedTuple):
    """A parameter or buffer, and the tensor that a folder holds for it.

    own: its name. names: all names of that tensor. shape: of that tensor. place: the parameter's in it, if it is a
    tile.
    """

    tensor: torch.Tensor
    own: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    place: Place = ()


def _targets(model: nn.Module) -> list[_Target]:
    pieces, found = Pieces(model), dict[int, list[tuple[str, Piece]]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append((name, pieces.of(own_name(name), parameter)))
    targets = []
    for parameter in model.parameters():
        (own, piece), *_ = named = found[id(parameter)]
        names = tuple(each.name for _, each in named)
        targets.append(_Target(parameter, own, names, piece.shape, piece.place))
    buffers = names_of_buffers(model)
    for own, buffer in persistent_buffers(model).items():
        names = tuple(name for name, each in buffers.items() if each is buffer)
        targets.append(_Target(buffer, own, names, tuple(buffer.shape)))
    return targets


def _load_buffer(model: nn.Module, names: Iterable[str], buffer: torch.Tensor, tensor: Saved) -> None:
    """Load a buffer; one on the meta device is replaced under all of its names by one on the CPU."""
    if buffer.is_meta:
        buffer = torch.empty_like(buffer, device="cpu")
        for path, _, own in (name.rpartition(".") for name in names):
            uncompiled(model.get_submodule(path))._buffers[own] = buffer
    tensor.copy_to(buffer)
    note_loaded(buffer)


def _unmatched(model: nn.Module, targets: Sequence[_Target], saved: Mapping[str, Saved]) -> Unmatched:
    known = {name for target in targets for name in target.names}
    # Some folders hold buffers that are not in the state_dict.
    known |= {own_name(name) for name, _ in model.named_buffers()}
    missing = dict.fromkeys(each.names[0] for each in targets if not any(name in saved for name in each.names))
    return Unmatched([*missing], [name for name in saved if name not in known])


def _misfits(targets: Sequence[_Target], saved: Mapping[str, Saved]) -> list[str]:
    problems = []
    for target in {each.names: each for each in targets}.values():
        copies = [saved[name] for name in target.names if name in saved]
        for tensor in copies:
            expected, stored = Spec(target.tensor.dtype, target.shape), tensor.spec
            if expected.shape != stored.shape:
                shapes = f"{list(expected.shape)} in the model and {list(stored.shape)} in the folder"
                problems.append(f"{tensor.name} has shape {shapes}")
            elif expected.dtype.is_floating_point != stored.dtype.is_floating_point:
                problems.append(f"{tensor.name} is {expected.dtype} in the model and {stored.dtype} in the folder")
        if len(copies) > 1 and len({tensor.spec for tensor in copies}) == 1 and not _same(copies):
            names_of_copies = " and ".join(tensor.name for tensor in copies)
            problems.append(f"{names_of_copies} differ, and are one parameter in the model")
    return problems


def _same(tensors: Sequence[Saved]) -> bool:
    numel = prod(tensors[0].spec.shape)
    for start in range(0, numel, PART):
        first, *others = (tensor.read(start, min(start + PART, numel)) for tensor in tensors)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def _saved_tensors(folder: Path) -> dict[str, SavedTensor]:
    """Return name → tensor of the folder. Only the headers of its files are read."""
    if (folder / WEIGHTS).is_file():
        return _tensors_of(folder / WEIGHTS)
    index = folder / WEIGHTS_INDEX
    try:
        files = parse_json(read_input(index))["weight_map"]
        named = {str(name): str(file) for name, file in files.items()}
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder.absolute()} is not a folder: pass one that save_pretrained or `infinity export` wrote"
            ) from None
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}: pass a folder on this machine that "
            "save_pretrained or `infinity export` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}): it is damaged") from None
    tensors: dict[str, SavedTensor] = {}
    for file in dict.fromkeys(named.values()):
        if not is_file_name(file):
            raise CheckpointError(f"{index} refers to {file!r}, which is not a file in the same folder")
        tensors |= _tensors_of(folder / file)
    lost = [name for name in named if name not in tensors]
    if lost:
        raise CheckpointError(f"{index} lists {lost[0]}, which {named[lost[0]]} does not hold: the folder is damaged")
    return tensors


def _tensors_of(file: Path) -> dict[str, SavedTensor]:
    try:
        open_input(file).close()  # safe_open would wait for a pipe
        with safe_open(file, framework="pt") as tensors:
            return {name: SavedTensor(file, name, spec_of(tensors, name)) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): it is missing or damaged") from None
