"""Imports DeepSpeed's modules that have no file here: `infinity.deepspeed.x.y` from the table in `tree`.

`infinity.deepspeed` installs `find_spec` for all names below it. Names of a module are imported when they are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from infinity.deepspeed import tree
from infinity.deepspeed.tree import placeholder

_ROOT = __name__.rpartition(".")[0]
_LEAVES = {*tree.WHOLE, *tree.NAMES, *tree.PLACEHOLDERS, *tree.CONSTANTS}


def _packages() -> Iterator[str]:
    for path in _LEAVES:
        while path := path.rpartition(".")[0]:
            yield path


_PACKAGES = frozenset(_packages())
_PATHS = _PACKAGES | _LEAVES


def find_spec(path: str) -> ModuleSpec | None:
    """Return the spec of the module at `path` below infinity.deepspeed; None if the table does not have it."""
    name = f"{_ROOT}.{path}"
    if path in tree.WHOLE:
        found = importlib.util.find_spec(f"{_ROOT}.{tree.WHOLE[path]}")
        assert found is not None
        return ModuleSpec(name, SameModule(found), origin=found.origin)
    if path in _PATHS:
        return ModuleSpec(name, _MirrorLoader(), origin=tree.__file__, is_package=path in _PACKAGES)
    return None


class SameModule(InspectLoader):
    """Loads the module of another spec, and leaves its attributes as they are."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._spec.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced it by the alias's spec.
        module.__spec__ = self._own

    def get_code(self, fullname: str) -> Any:
        """Return the code that `python -m deepspeed.x` runs."""
        return self._asked("get_code")

    def get_source(self, fullname: str) -> Any:
        return self._asked("get_source")

    def _asked(self, method: str) -> Any:
        # By name: the loader of an editable install forwards its methods, and is no subclass of InspectLoader.
        ask = getattr(self._spec.loader, method, None)
        return None if ask is None else ask(self._spec.name)


class _MirrorLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mirror(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Mirror(ModuleType):
    """A module of DeepSpeed's, whose names are in the table."""

    def __init__(self, name: str) -> None:
        path = name.removeprefix(f"{_ROOT}.")
        super().__init__(name, f"Names of `deepspeed.{path}`; see `infinity.deepspeed.tree`.")
        self._path = path
        self.__file__ = tree.__file__  # for `inspect` and scripts that look beside a module
        self._homes = _split(tree.NAMES.get(path, {}))
        self._placeholders = _split(tree.PLACEHOLDERS.get(path, {}))
        constants = tree.CONSTANTS.get(path, {})
        self.__dict__.update(constants, __all__=[*self._homes, *constants])

    def __getattr__(self, name: str) -> Any:
        if name in self._homes:
            home, attribute = self._homes[name]
            value = getattr(import_module(home if home.startswith("infinity.") else f"{_ROOT}.{home}"), attribute)
        elif name in self._placeholders:
            value = placeholder(name, self._placeholders[name][0])
        elif f"{self._path}.{name}" in _PATHS:
            return import_module(f"{self.__name__}.{name}")
        else:
            missing = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(tree.REFUSED.get(f"{self._path}.{name}", missing))
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # An import binds a submodule to its package, and `utils.z3_leaf_module` is a function and a submodule.
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("_homes", ())):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes, *self._placeholders})


def _split(rows: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return name → (its home or alternative, its name there)."""
    names: dict[str, tuple[str, str]] = {}
    for home, listed in rows.items():
        for each in listed.split():
            name, _, there = each.partition("=")
            names[name] = home, there or name
    return names
