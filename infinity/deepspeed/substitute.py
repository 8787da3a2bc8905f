"""Puts infinity.deepspeed in place of the package deepspeed, in a process and in the children that it starts.

The folder `shim/` has a package `deepspeed` and the metadata of a distribution of that name. With the folder first in
PYTHONPATH, every Python process finds both there, before an installed DeepSpeed: `find_spec`, `importlib.metadata`,
`import`. The package replaces itself by infinity.deepspeed when it is imported.
See [Note: in place of deepspeed].

Imports DeepSpeed's modules that have no file here: `infinity.deepspeed.x.y` from the table in `tree`.

`infinity.deepspeed` installs `find_spec` for all names below it. Names of a module are imported when they are read.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from infinity.deepspeed import tree
from infinity.deepspeed.tree import alternative, placeholder
from infinity.errors import UsageError

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

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code that `python -m deepspeed.x` runs."""
        code: CodeType | None = self._asked("get_code")
        return code

    def get_source(self, fullname: str) -> str | None:
        source: str | None = self._asked("get_source")
        return source

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


SHIM = Path(__file__).parent / "shim"
"""Folder for PYTHONPATH: a package deepspeed and its distribution metadata."""

_NAME, _OURS = "deepspeed", "infinity.deepspeed"


def substituted_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the shim first in PYTHONPATH. Idempotent.

    Raises UsageError if PYTHONPATH cannot name the shim's folder.
    """
    shim = str(SHIM)
    if os.pathsep in shim:
        raise UsageError(
            f"{shim} contains {os.pathsep!r}, which separates the folders of PYTHONPATH: install elsewhere"
        )
    old = environ.get("PYTHONPATH", "")
    others = [folder for folder in old.split(os.pathsep) if folder != shim] if old else []  # an empty one is the cwd
    return {**environ, "PYTHONPATH": os.pathsep.join([shim, *others])}


def substitute() -> None:
    """Put infinity.deepspeed in place of deepspeed in this process and its children. Idempotent.

    Libraries such as transformers look for deepspeed when they are imported: call this before.
    Raises UsageError if another deepspeed is already imported.
    """
    loaded = sys.modules.get(_NAME)
    if loaded is not None and loaded is not sys.modules.get(_OURS):
        version = getattr(loaded, "__version__", "of unknown version")
        raise UsageError(
            f"deepspeed {version} is already imported, from {getattr(loaded, '__file__', 'an unknown place')}: "
            "call substitute() before any import of deepspeed, or start the script with `infinity run`"
        )
    os.environ.update(substituted_environment(os.environ))
    sys.path[:] = [str(SHIM), *(folder for folder in sys.path if folder != str(SHIM))]
    importlib.invalidate_caches()


def alias_modules() -> None:
    """Make `deepspeed` and its submodules the very module objects of infinity.deepspeed. Idempotent."""
    sys.modules[_NAME] = importlib.import_module(_OURS)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def find_shadow(folder: Path) -> Path | None:
    """Return the package or module deepspeed in `folder`, which a script there would import instead of the shim's.

    A folder deepspeed without `__init__.py`, such as one of configs, does not hide the shim.
    """
    spec = importlib.machinery.PathFinder.find_spec(_NAME, [str(folder)])
    if spec is None or spec.origin is None or folder.resolve() == SHIM.resolve():
        return None
    return Path(spec.origin)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `deepspeed.x.y` as the module infinity.deepspeed.x.y."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}."):
            return None
        found = importlib.util.find_spec(f"infinity.{fullname}")
        if found is None:
            text = alternative(fullname.split(".")[1])
            if text is not None:
                raise ModuleNotFoundError(text, name=fullname)
            return None
        package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, SameModule(found), origin=found.origin, is_package=package)
