"""Tables of mutants: the tests that matter for a file, the survivors that are justified, the results of former runs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mutants.sites import Mutant
from mutants.trial import Result

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]  # pytest brings it

HERE = Path(__file__).parent


def load(name: str) -> dict[str, Any]:
    with open(HERE / name, "rb") as file:
        table: dict[str, Any] = tomllib.load(file)
    return table


@dataclass(frozen=True)
class Selections:
    """The tests that a mutant is run with: those of the longest entry that its name begins with."""

    by_prefix: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls) -> Selections:
        return cls(load("selections.toml")["tests"])

    def of(self, name: str) -> Sequence[str]:
        """name: of a mutant or a file. Empty: it is left out."""
        fitting = [prefix for prefix in self.by_prefix if name.startswith(prefix)]
        return self.by_prefix[max(fitting, key=len)] if fitting else ()

    def files(self, package: Path) -> list[str]:
        """The files of the package that have tests here."""
        paths = (str(path.relative_to(package)) for path in sorted(package.rglob("*.py")))
        return [path for path in paths if self.of(path)]

    def stale(self, names: Iterable[str], root: Path) -> list[str]:
        """Entries that none of these names begins with, and tests that are not below `root`."""
        every = list(names)
        entries = [prefix for prefix in self.by_prefix if not any(name.startswith(prefix) for name in every)]
        tests = dict.fromkeys(test for tests in self.by_prefix.values() for test in tests)
        return [f"selections.toml: {name}" for name in [*entries, *(t for t in tests if not _exists(root, t))]]


class Justified:
    """Survivors that no test can detect: pattern of names → reason."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons

    @classmethod
    def read(cls) -> Justified:
        return cls(load("justified.toml")["survivors"])

    def reason(self, name: str) -> str:
        """Return the reason for a survivor; empty: there is none."""
        return next((reason for pattern, reason in self.reasons.items() if matches(name, pattern)), "")

    def stale(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        every = list(names)
        return [
            f"justified.toml: {pattern}"
            for pattern in self.reasons
            if not any(matches(name, pattern) for name in every)
        ]


def _exists(root: Path, test: str) -> bool:
    """Return True if the test "file" or "file::function" exists; parameters are not checked."""
    file, _, function = test.partition("::")
    path = root / file
    name = function.partition("[")[0]
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def matches(name: str, pattern: str) -> bool:
    """Return True if `pattern`, which may contain `*`, matches `name` or a prefix of it that ends at a separator."""
    return any(fnmatchcase(name, pattern + end) for end in ("", "/*", ":*", ".*", "#*"))


class Cache:
    """Results by the sources of mutant and tests. Other changes of the package leave them valid; see `--fresh`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, key: str) -> Result | None:
        found = self._results.get(key)
        return Result(**found) if found is not None else None

    def put(self, key: str, result: Result) -> None:
        if result.outcome in ("killed", "timeout", "survived", "chance"):
            self._results[key] = asdict(result)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(self._results, indent=1))
            partial.replace(self._file)


def key_of(mutant: Mutant, root: Path, tests: Sequence[str]) -> str:
    """Return the cache key: a digest of the mutant's source, its selection, and the sources of the tests."""
    digest = hashlib.sha256(f"{mutant.file} {mutant.digest} {tests}".encode())
    folders = [root / test.split("::")[0] for test in tests]
    for path in [*folders, root / "tests/support", root / "tests/conftest.py"]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.exists():
                digest.update(file.read_bytes())
    return digest.hexdigest()
