"""The states of one parameter in an optimizer's own dict, and as bytes of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from infinity.plan.records import Field, States

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_CONSTANTS = (type(None), str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class _Constant:
    """A state that is no tensor and no number, such as None."""

    value: Any


def describe(state: Mapping[str, Any], *, is_meta: bool = False) -> States:
    """Return the names, dtypes and shapes of a parameter's states, and their places in its dict. is_meta: the parameter
    is a meta tensor.
    """
    paths, tree = tree_flatten_with_path(dict(state))
    fields: list[Field] = []
    constants: list[_Constant | None] = []
    for path, leaf in paths:
        name = _name(path)
        if isinstance(leaf, torch.Tensor):
            # Beside a meta parameter, the class chose host memory; beside one in host memory, a scalar may stay there.
            on_host = leaf.is_cpu and (is_meta or not leaf.dim())
            fields.append(Field(name, leaf.dtype, tuple(leaf.shape), on_host=on_host))
            constants.append(None)
        elif type(leaf) in _NUMBERS:
            fields.append(Field(name, _NUMBERS[type(leaf)], (), is_number=True))
            constants.append(None)
        else:
            constants.append(_Constant(leaf))
    return States(tuple(fields), (tree, tuple(constants)))


def _name(path: tuple[Any, ...]) -> str:
    """Return a name that no other state of the parameter has, such as exp_avg or sums[0]. "master" is the engine's."""
    key = path[0].key
    is_plain = isinstance(key, str) and key.isidentifier() and key != "master"
    return f"{key}{keystr(path[1:])}" if is_plain else keystr(path)


def why_not_stored(state: Mapping[str, Any], param: torch.Tensor) -> str:
    """Return why bytes do not stand for a parameter's state; empty if they do."""
    leaves = tree_flatten(dict(state))[0]
    for leaf in leaves:
        kind = type(leaf)
        if isinstance(leaf, torch.Tensor) and kind not in (torch.Tensor, nn.Parameter):
            return f"a state is a {kind.__name__}, and only plain tensors are stored"
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype.is_complex or leaf.layout is not torch.strided:
                return f"a state is {leaf.dtype}, {leaf.layout}, and only dense real values are stored"
        elif kind not in _NUMBERS and not isinstance(leaf, _CONSTANTS):
            return f"a state is a {kind.__name__}, and only tensors, numbers and texts are stored"
    if not param.is_meta:
        tensors = (leaf for leaf in (param, *leaves) if isinstance(leaf, torch.Tensor))
        places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
        if len(set(places)) < len(places):
            return "two of its states, or a state and the parameter, share memory"
    return ""


def load(states: States, memory: torch.Tensor) -> dict[str, Any]:
    """Return an optimizer's own dict of a parameter. Its tensors are views of `memory`, a record's bytes."""
    if states.tree is None:
        return {}
    fields = iter(states.fields)
    tree, constants = states.tree

    def value(constant: _Constant | None) -> Any:
        if constant is not None:
            return constant.value
        each = next(fields)
        there = each.of(memory)
        if each.is_number:
            return there.item()
        return there.cpu() if each.on_host and not memory.is_meta else there

    loaded: dict[str, Any] = tree_unflatten([value(constant) for constant in constants], tree)
    return loaded


def store(state: Mapping[str, Any], states: States, memory: torch.Tensor) -> None:
    """Copy to `memory` what the optimizer has not changed there. Raises ValueError unless `state` has `states`."""
    found = describe(state)
    if not alike(found, states):
        had, has = (shown(each.fields) for each in (states, found))
        raise ValueError(f"its states are {has} now, and were {had} at the first steps")
    leaves = tree_flatten(dict(state))[0]
    values = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) or type(leaf) in _NUMBERS)
    places = [each.of(memory) for each in states.fields]
    # A class may move a state to another name, whose place is overwritten below before it is read.
    kept = [_apart(value, place, memory) for place, value in zip(places, values, strict=True)]
    for place, value in zip(places, kept, strict=True):
        if not isinstance(value, torch.Tensor):
            place.fill_(value)
        elif value.data_ptr() != place.data_ptr() or not value.is_contiguous():
            place.copy_(value)


def _apart(value: Any, place: torch.Tensor, memory: torch.Tensor) -> Any:
    """Return a state, copied if it lies in `memory` at another place than its own."""
    if not isinstance(value, torch.Tensor) or value.device != memory.device or value.is_meta:
        return value
    inside = value.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    return value.clone() if inside and value.data_ptr() != place.data_ptr() else value


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state."""
    leaves, tree = tree_flatten(state)
    copies: dict[str, Any] = tree_unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], tree)
    return copies


def alike(one: States, other: States) -> bool:
    """Return whether states have the same names, dtypes, shapes and places in their dict."""
    return [*map(_signature, one.fields)] == [*map(_signature, other.fields)] and one.tree == other.tree


def _signature(each: Field) -> tuple[Any, ...]:
    return each.name, each.dtype, each.shape, each.is_number


def shown(fields: Iterable[Field]) -> str:
    """Return names and shapes for an error."""
    return ", ".join(f"{each.name} {'number' if each.is_number else list(each.shape)}" for each in fields) or "none"


def snapshot(value: Any) -> Any:
    """Return a value with which `same` finds changes in place: tensors and containers are copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: snapshot(each) for key, each in value.items()}
    return type(value)(map(snapshot, value)) if type(value) in (list, tuple, set) else value


def same(value: Any, other: Any) -> bool:
    """Return whether a step left a value as it was. other: its `snapshot` before."""
    if value is other:
        return True
    if type(value) is dict and type(other) is dict:
        return value.keys() == other.keys() and all(same(each, other[key]) for key, each in value.items())
    if type(value) in (list, tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)
