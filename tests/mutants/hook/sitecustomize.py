"""Serves one module's source from another file, in a Python with this folder on PYTHONPATH and in its child processes.

INFINITY_MUTANT: a file "FOLDER/package.module.py" with the source. When the module has been imported from it, an empty
file with the suffix ".served" is created beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType


class _Loader(SourceFileLoader):
    """The module keeps its own path, so that only its code differs."""

    def __init__(self, name: str, path: str, mutant: str) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        with open(self._mutant, "rb") as file:
            code: CodeType = compile(file.read(), self.path, "exec", dont_inherit=True)
        with open(self._mutant + ".served", "w"):
            return code


class _Finder:
    def __init__(self, mutant: str) -> None:
        self._mutant = mutant
        self._module = os.path.basename(mutant).removesuffix(".py")

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        for finder in sys.meta_path:  # an editable install has one of its own
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.origin is not None:
                spec.loader = _Loader(name, spec.origin, self._mutant)
                return spec
        return None


if mutant := os.environ.get("INFINITY_MUTANT"):
    sys.meta_path.insert(0, _Finder(mutant))  # type: ignore[arg-type]
