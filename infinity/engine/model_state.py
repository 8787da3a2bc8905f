"""Values that a forward may change besides gradients: attributes of modules, and generators of random numbers.

A snapshot compares attributes by identity, containers and plain objects in them by their contents, and tensors by their
version. It cannot see variables of Python modules and closures.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_DEPTH = 4
"""Largest depth of containers and objects below a module."""
_ENGINES = frozenset({"forward", "_apply", "__prepare_scriptable__", "_parameters"})
"""Attributes of modules that an engine replaces."""
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
_OPAQUE: tuple[type, ...] = (
    *(int, float, complex, str, bytes, nn.Module, torch.dtype, torch.device),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)
_Contents = dict[int, tuple[Any, Any]]


class ModelState:
    """The present attributes of all modules of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._contents = _read(model)

    def changed(self) -> str | None:
        """Return the class of an object whose contents changed since; None if none did."""
        present = _read(self._model)
        for key, (owner, before) in self._contents.items():
            if key not in present or not _same(present[key][1], before):
                return type(owner).__name__
        return None if len(present) == len(self._contents) else type(self._model).__name__

    def restore(self) -> bool:
        """Set attributes and containers to their former values. Returns False if the contents of a tensor changed."""
        for owner, before in self._contents.values():
            if isinstance(owner, torch.Tensor):
                continue
            if isinstance(owner, list):
                owner[:] = before
            elif isinstance(owner, deque):
                owner.clear()
                owner.extend(before)
            elif isinstance(owner, set):
                owner.clear()
                owner.update(before)
            elif isinstance(before, dict):
                _restore(owner if isinstance(owner, dict) else owner.__dict__, before)
        return self.changed() is None


def _restore(present: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in [name for name in present if name not in before and name not in _ENGINES]:
        del present[name]
    for name, value in before.items():
        if name not in present or present[name] is not value:
            present[name] = value


def _read(model: nn.Module) -> _Contents:
    """Return id → object and its contents, for each module and everything that its attributes reach."""
    found: _Contents = {}
    for module in model.modules():
        attributes = {name: value for name, value in module.__dict__.items() if name not in _ENGINES}
        found[id(module)] = module, attributes
        for value in attributes.values():
            if type(value) not in _PLAIN:
                _visit(value, found, _DEPTH)
    return found


def _visit(value: Any, found: _Contents, depth: int) -> None:
    if type(value) in _PLAIN or not depth or id(value) in found or isinstance(value, _OPAQUE):
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            found[id(value)] = value, None if value.is_inference() else value._version
        return
    contents: Any
    if isinstance(value, torch.Generator):
        found[id(value)] = value, value.get_state().numpy().tobytes()
        return
    if isinstance(value, dict):
        contents = dict(value)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        contents = list(value)
    elif isinstance(getattr(value, "__dict__", None), dict):
        contents = dict(value.__dict__)
    else:
        return
    found[id(value)] = value, contents
    for part in contents.values() if isinstance(contents, dict) else contents:
        if type(part) not in _PLAIN:
            _visit(part, found, depth - 1)


def _same(present: Any, before: Any) -> bool:
    """Compare contents: parts by identity, and numbers by value."""
    if isinstance(before, dict):
        return list(present) == list(before) and all(map(_is, present.values(), before.values()))
    if isinstance(before, list):
        return len(present) == len(before) and all(map(_is, present, before))
    return bool(present == before)


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


class RandomState:
    """The present state of the generators of torch, Python and numpy. device: torch's device of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = list(_generators(device))

    def moved(self) -> bool:
        """Return whether a generator has drawn numbers since."""
        present = [key for key, _ in _generators(self._device)]
        return present != [key for key, _ in self._states]

    def restore(self) -> None:
        for _, restore in self._states:
            restore()


def _generators(device: torch.device) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield the state of each generator, and the function that restores it."""
    host = torch.get_rng_state()
    yield host.numpy().tobytes(), lambda: torch.set_rng_state(host)
    if device.type != "cpu":
        module: Any = getattr(torch, device.type)
        there = module.get_rng_state(device)
        yield there.cpu().numpy().tobytes(), lambda: module.set_rng_state(there, device)
    python = random.getstate()
    yield python, lambda: random.setstate(python)
    if (numpy := sys.modules.get("numpy")) is not None:
        arrays: Any = numpy.random.get_state(legacy=True)
        yield (arrays[1].tobytes(), arrays[2:]), lambda: numpy.random.set_state(arrays)
