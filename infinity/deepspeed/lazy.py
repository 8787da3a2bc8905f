"""Submodules that are imported when an attribute of their package is read, such as `deepspeed.ops.adam`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def submodules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` for `package` that imports its submodules `names`."""

    def get(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return get


def first_of(*getters: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a `__getattr__` that returns the result of the first of `getters` which has the name."""

    def get(name: str) -> Any:
        for getter in getters[:-1]:
            try:
                return getter(name)
            except AttributeError:
                continue
        return getters[-1](name)

    return get
