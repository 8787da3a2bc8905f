"""Checks what a wheel or an sdist contains.

    python lint/wheel.py dist/infinity_engine-0.1.0-*.whl dist/infinity_engine-0.1.0.tar.gz

A wheel has the package, its compiled modules, the stubs, `py.typed` and the license, and nothing else: no tests, no
results of benchmarks, no sources to compile. An sdist has what a build needs. Exits with 1 if either does not hold.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path

IN_WHEEL = (
    "infinity/__init__.py",
    "infinity/__init__.pyi",
    "infinity/deepspeed/shim/deepspeed/__init__.py",
    "infinity/deepspeed/shim/deepspeed-*.egg-info/PKG-INFO",
    "infinity/deepspeed/shim/deepspeed-*.egg-info/entry_points.txt",
    "infinity/deepspeed/shim/deepspeed-*.egg-info/top_level.txt",
    "infinity/deepspeed/shim/infinity_watch.py",
    "infinity/py.typed",
    "infinity/native/_adam.*.so",
    "infinity/native/_adam.pyi",
    "infinity/native/_aio.*.so",
    "infinity/native/_aio.pyi",
    "infinity/native/_heartbeat.*.so",
    "infinity/native/_heartbeat.pyi",
    "infinity_engine-*.dist-info/entry_points.txt",
    "infinity_engine-*.dist-info/licenses/LICENSE",
)
IN_SDIST = (
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "PKG-INFO",
    "constraints.txt",
    "csrc/adam/kernel_avx512.cpp",
    "csrc/aio/libaio.map",
    "infinity/__init__.py",
    "infinity/py.typed",
    "pyproject.toml",
    "tests/conftest.py",
)
_FOREIGN = re.compile(r"(?!infinity/|infinity_engine-[^/]+\.dist-info/)")
_UNWANTED = re.compile(r"\.(cpp|h|cu|cuh|o|pyc)$|(^|/)(tests|__pycache__)/|(^|/)bench/results/")
_EXTRAS = {"docs", "hjson", "integrations", "lint", "plots", "test"}


def wheel_problems(names: Sequence[str], metadata: Message) -> Iterator[str]:
    """Yield the faults of a wheel with the files `names`."""
    yield from _missing(names, IN_WHEEL)
    for name in names:
        if _FOREIGN.match(name) or _UNWANTED.search(name):
            yield f"{name} does not belong into a wheel"
    for key, value in {"License-Expression": "Apache-2.0", "Requires-Python": ">=3.10"}.items():
        if metadata[key] != value:
            yield f"{key} is {metadata[key]!r}, not {value!r}"
    if set(metadata.get_all("Provides-Extra", [])) != _EXTRAS:
        yield f"the extras are not {sorted(_EXTRAS)}"
    if not str(metadata.get_payload()).lstrip().startswith("# Infinity"):
        yield "the long description is not README.md"
    if "Typing :: Typed" not in metadata.get_all("Classifier", []):
        yield "the classifier of typed packages is missing"


def sdist_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield the faults of an sdist with the files `names`, without their first folder."""
    yield from _missing(names, IN_SDIST)
    for name in names:
        if name.endswith((".so", ".pyc")) or name.startswith(("bench/results/", "build/", "docs/", ".ci/")):
            yield f"{name} does not belong into an sdist"


def _missing(names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            yield f"{pattern} is missing"


def problems(path: Path) -> list[str]:
    """Return the faults of the wheel or sdist at `path`."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if not name.endswith("/")]
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            return list(wheel_problems(names, message_from_bytes(wheel.read(metadata))))
    with tarfile.open(path) as archive:
        return list(sdist_problems([member.name.partition("/")[2] for member in archive if member.isfile()]))


def main(arguments: list[str]) -> int:
    count = 0
    for argument in arguments:
        for problem in problems(Path(argument)):
            count += 1
            print(f"{argument}: {problem}")
    return count > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
