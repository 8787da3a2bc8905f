"""Puts infinity.deepspeed in place of the package deepspeed, in a process and in the children that it starts.

The folder `shim/` has a package `deepspeed` and the metadata of a distribution of that name. With the folder first in
PYTHONPATH, every Python process finds both there, before an installed DeepSpeed: `find_spec`, `importlib.metadata`,
`import`. The package replaces itself by infinity.deepspeed when it is imported.
An entry point of the distribution notes scripts that train without an engine (infinity.observe.without_engine).
See [Note: in place of deepspeed].
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from infinity.deepspeed.mirror import SameModule
from infinity.deepspeed.tree import alternative
from infinity.errors import UsageError

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
