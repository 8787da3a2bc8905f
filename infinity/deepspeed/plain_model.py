"""Loads a checkpoint's weights into a model on the CPU, after closing its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

import infinity.engine.gather as gather
from infinity.checkpoint.format import names_of_buffers
from infinity.errors import CheckpointError
from infinity.nn.pieces import Pieces
from infinity.units import released
from infinity.units.compiled import own_name, uncompiled

Model = TypeVar("Model", bound=nn.Module)
States = Mapping[str, torch.Tensor]
_SHOWN = 3
"""Largest number of problems in an error."""


class _Expected(NamedTuple):
    """Shape of a tensor of the model's state dict, and the identity of the parameter or buffer."""

    shape: tuple[int, ...]
    owner: int


def load_plain(model: Model, states: States, source: Path, *, strict: bool) -> Model:
    """Close the engines of `model`, move it to the CPU, load `states` into it, and return it.

    states: values by their names in the model's state dict; one name of a shared tensor suffices. source: their folder,
    for messages. strict: raise CheckpointError, before any change, if names differ; other shapes raise it in any case.
    """
    expected = _expected(model)
    # Checkpoints of older versions lack the further names of shared tensors.
    values = {each.owner: states[name] for name, each in expected.items() if name in states}
    states = {name: values[each.owner] for name, each in expected.items() if each.owner in values} | {**states}
    _check(expected, states, source, strict=strict)
    _leave_engines(model)
    model = model.cpu()
    uncompiled(model).load_state_dict(states, strict=strict)
    return model


def _expected(model: nn.Module) -> dict[str, _Expected]:
    pieces, found = Pieces(model), dict[str, _Expected]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        piece = pieces.of(own_name(name), parameter)
        found[piece.name] = _Expected(tuple(piece.shape), id(parameter))
    for name, buffer in names_of_buffers(model).items():
        found[name] = _Expected(tuple(buffer.shape), id(buffer))
    return found


def _check(expected: Mapping[str, _Expected], states: States, source: Path, *, strict: bool) -> None:
    problems = []
    if strict:
        problems = [f"{name} is in the model only" for name in expected if name not in states]
        problems += [f"{name} is in the checkpoint only" for name in states if name not in expected]
    for name, (shape, _) in expected.items():
        if name in states and tuple(states[name].shape) != shape:
            shapes = f"{list(shape)} in the model and {list(states[name].shape)} in the checkpoint"
            problems.append(f"{name} has shape {shapes}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{source} is a checkpoint of another model: {'; '.join(problems[:_SHOWN])}{more}")


def _leave_engines(model: nn.Module) -> None:
    """Close the engines of the parameters of `model`, and give parameters without values memory on the CPU."""
    found = [gather._find(parameter) for parameter in model.parameters()]
    for engine in dict.fromkeys(each[0] for each in found if each is not None):
        engine.close()
    for parameter in model.parameters():
        if released.is_released(parameter):
            released.restore_types([parameter])
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
