"""Values that a forward may change besides gradients: attributes, and variables of its code.

A snapshot compares attributes by identity, containers and plain objects in them by their contents, and tensors and
parameters by their version. It follows the globals and closures of the functions of a model's classes, and the
attributes of modules, classes and objects that these name. It cannot see variables of torch, of Python's standard
library and of `_LIBRARIES`, and states of extensions.
"""

from __future__ import annotations

import functools
import logging
import operator
import pickle
import queue
import random
import re
import sys
import sysconfig
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

import torch
from torch import nn

from infinity.units.released import version_of

_DEPTH = 12
"""Largest depth of containers and objects below a module."""
_ENGINES = frozenset({"forward", "_apply", "__prepare_scriptable__"})
"""Attributes of modules that an engine replaces."""
_LIBRARIES = frozenset({"torch", "infinity", "numpy", "huggingface_hub", "safetensors", "packaging", "_pytest"})
"""Packages whose functions and classes are not followed, as those of the standard library. pytest's are named by each
`assert` of a model in a test, and reach its log and its threads.
"""
_OF_EVERY_MODULE = tuple(nn.Module().__dict__)
_LARGE = frozenset({"transformers"})
"""Packages whose classes are not followed: many, and without variables that a forward sets."""
_STANDARD = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
_DICTIONARIES = frozenset({dict, OrderedDict})
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
_OPAQUE: tuple[type, ...] = (
    *(int, float, complex, str, bytes, torch.dtype, torch.device, ModuleType, BuiltinFunctionType),
    *(GetSetDescriptorType, MemberDescriptorType, UnionType, logging.Logger, re.Pattern),
)
_LOCKS = type(threading.Lock()), type(threading.RLock())
_FOLLOWED = functools.partial, weakref.ref
"""Callables of the standard library that refer to others."""
_COMPARED_BYTES = 64 << 20
"""Size in bytes up to which the contents of a tensor are compared."""
_Contents = dict[int, tuple[Any, Any]]
_MISSING = object()


class ModelState:
    """The present attributes of all modules of a model, and everything that they and other objects reach."""

    def __init__(self, *roots: Any, by_value: bool = False) -> None:
        """roots: the model, a loss function, batches. by_value: compare the contents of tensors, too, which code may
        edit through `.data` without a new version.
        """
        self._contents: _Contents = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        _visit_all(roots, self._contents)
        in_modules = {
            id(module.__dict__[name])
            for module in (owner for owner, _ in self._contents.values() if isinstance(owner, nn.Module))
            for name in _OF_EVERY_MODULE
            if name in module.__dict__
        }
        self._attributes = [
            each
            for key, each in self._contents.items()
            if key not in in_modules and not isinstance(each[0], nn.Parameter)
        ]
        self.unreadable = next((type(o).__name__ for o, c in self._attributes if isinstance(c, _Unreadable)), None)
        """Class of an object whose contents cannot be compared; None: there is none."""
        for owner, _ in self._contents.values():
            if not isinstance(owner, torch.Tensor) or isinstance(owner, nn.Parameter):
                continue
            if (by_value or _is_foreign(owner)) and _is_comparable(owner):
                self._tensors.append((owner, owner.detach().clone()))

    def changed(self, *, quick: bool = False) -> str | None:
        """Return the class of an object whose contents changed since; None if none did.

        quick: compare neither parameters nor the dictionaries that every module has, such as those of hooks.
        """
        for owner, before in self._attributes if quick else self._contents.values():
            if type(owner) in _DICTIONARIES and not owner and not before:  # as hooks of most modules
                continue
            if not _same(_contents_of(owner), before):
                return owner.__name__ if isinstance(owner, (type, FunctionType)) else type(owner).__name__
        for tensor, before in self._tensors:
            if tensor.shape != before.shape or not torch.equal(_bits(tensor), _bits(before)):
                return type(tensor).__name__
        return None

    def restore(self) -> bool:
        """Set attributes and containers to their former values. Returns False if other contents changed."""
        for owner, before in self._contents.values():
            if isinstance(owner, list):
                owner[:] = before
            elif isinstance(owner, deque):
                owner.clear()
                owner.extend(before)
            elif isinstance(owner, (set, frozenset)):
                if isinstance(owner, set) and not _same(_contents_of(owner), before):  # refilling changes the order
                    owner.clear()
                    owner.update(before.values())
            elif isinstance(before, dict) and isinstance(owner, dict):
                _restore(owner, before)
            elif isinstance(before, dict) and _is_plain_object(owner):
                _restore(owner.__dict__, before)
        return self.changed() is None


def _is_plain_object(value: Any) -> bool:
    is_object = isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, FunctionType)
    return is_object and not _slots(value)


def _restore(present: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in [name for name in present if name not in before and name not in _ENGINES]:
        del present[name]
    for name, value in before.items():
        if dict.get(present, name, _MISSING) is not value:  # subclasses may fetch parameters
            present[name] = value
    if not all(map(_is, (name for name in present if name not in _ENGINES), before)):
        for name, value in before.items():
            del present[name]
            present[name] = value


_Pending = deque[tuple[Any, int]]
"""Values to visit, each with the depth that is left below it: the largest depths first."""


def _visit_all(roots: Iterable[Any], found: _Contents) -> None:
    """Add everything that `roots` reach: id → object and its contents. Breadth-first, so that the shortest way to an
    object decides whether its parts are within the depth, not the first one.
    """
    pending: _Pending = deque((root, _DEPTH) for root in roots)
    while pending:
        value, depth = pending.popleft()
        _visit(value, found, depth, pending)


def _visit(value: Any, found: _Contents, depth: int, pending: _Pending) -> None:
    if type(value) in _PLAIN or not depth or id(value) in found:
        return
    if isinstance(value, nn.Module):
        for module in value.modules():
            if id(module) not in found:
                _visit_parts(module, found, depth, pending)
                for parameter in module.parameters(recurse=False):
                    _visit(parameter, found, depth, pending)
                _visit_class(type(module), found, depth, pending)
        return
    if isinstance(value, type):
        _visit_class(value, found, depth, pending)
    elif isinstance(value, _FOLLOWED) or not (isinstance(value, _OPAQUE) or (callable(value) and _is_library(value))):
        _visit_parts(value, found, depth, pending)
        _visit_class(type(value), found, depth, pending)


def _visit_class(kind: type, found: _Contents, depth: int, pending: _Pending) -> None:
    for base in kind.__mro__:
        if (
            id(base) not in found
            and not _is_library(base)
            and (_package(base) not in _LARGE or issubclass(base, nn.Module))
        ):
            _visit_parts(base, found, depth, pending)


def _visit_parts(owner: Any, found: _Contents, depth: int, pending: _Pending) -> None:
    contents = _contents_of(owner)
    if contents is None:
        return
    found[id(owner)] = owner, contents
    parts = contents.values() if isinstance(contents, dict) else contents if isinstance(contents, list) else ()
    pending.extend((part, depth - 1) for part in parts if type(part) not in _PLAIN)


def _contents_of(value: Any) -> Any:
    """Return the present contents: a dict or list of parts, another value to compare, or None if it has none."""
    if isinstance(value, nn.Module):
        return {name: part for name, part in value.__dict__.items() if name not in _ENGINES}
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter):
            return [version_of(value), *value.__dict__, *value.__dict__.values()]
        return None if value.is_inference() else value._version
    if isinstance(value, dict):
        return dict(dict.items(value))  # subclasses may compute values
    if isinstance(value, (set, frozenset)):
        return _Members((_identity(part), part) for part in value)
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, type):
        return dict(vars(value))
    if isinstance(value, FunctionType):
        return _variables(value)
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, _LOCKS):
        return repr(value).startswith("<locked")
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (threading.local, queue.SimpleQueue)):
        return _Unreadable()
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else {"instruction": frame.f_lasti, **frame.f_locals}
    slots = _slots(value)
    if isinstance(getattr(value, "__dict__", None), dict):
        return {**value.__dict__, **slots}
    return slots or _pickled(value)


class _Members(dict[Any, Any]):
    """The members of a set, by `_identity`. Their order, which depends on how the set was filled, is not compared."""


class _Unreadable:
    """Contents that differ from everything, since they are unknown."""


def _slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if name[:2] != "__" and hasattr(value, name)}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _pickled(value: Any) -> Any:
    """Return the state of an object of an extension, such as a numpy array or generator."""
    with suppress(Exception):
        return pickle.dumps(value)
    return _Unreadable() if hasattr(value, "__next__") else None


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of other scopes that a function uses, and its defaults."""
    found = dict(function.__dict__)
    for number, value in enumerate(function.__defaults__ or ()):
        found[f"default {number}"] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[f"cell {name}"] = cell.cell_contents
    names = _global_names(function.__code__)
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            found[f"global {name}"] = value
            if isinstance(value, ModuleType):
                found.update(_named_in(value, names, {value}))
    return found


def _named_in(module: ModuleType, names: tuple[str, ...], seen: set[ModuleType]) -> dict[str, Any]:
    """Return the variables of `module`, and of modules in it, that have one of the names."""
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return {}
    present = vars(module)
    found = {f"{module.__name__}.{name}": present[name] for name in names if name in present}
    for value in list(found.values()):
        if isinstance(value, ModuleType) and value not in seen:
            seen.add(value)
            found |= _named_in(value, names, seen)
    return found


@functools.lru_cache(4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return tuple(dict.fromkeys(names))


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]


def _is_library(value: Any) -> bool:
    package = _package(value)
    return package in _LIBRARIES or (package in sys.stdlib_module_names and _is_standard(package))


@functools.lru_cache(4096)
def _is_standard(package: str) -> bool:
    """Return whether the module is that of the standard library, not one of the same name in another folder."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or file.startswith(_STANDARD)


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Return whether another library may write the memory of a tensor, as numpy."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def _is_comparable(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is torch.Tensor
    return is_dense and tensor.nbytes <= _COMPARED_BYTES


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same(present: Any, before: Any) -> bool:
    """Compare contents: parts by identity, and numbers by value."""
    if isinstance(before, _Members):
        return isinstance(present, _Members) and present.keys() == before.keys()
    if isinstance(before, dict):
        if len(present) != len(before):
            return False
        if all(map(operator.is_, present.values(), before.values())) and all(map(operator.is_, present, before)):
            return True  # of most objects, and quickly
        return all(map(_is, present, before)) and all(map(_is, present.values(), before.values()))
    if isinstance(before, list):
        return len(present) == len(before) and all(map(_is, present, before))
    return bool(present == before)


def _identity(part: Any) -> Any:
    """Return a key that is equal for parts that `_is` takes as the same."""
    return (type(part), part) if type(part) in _PLAIN else id(part)


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)
