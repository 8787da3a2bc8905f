"""The package that a call measures: a wheel of the same sources, or one built for the present device.

python3 bench/gpu_kit/package.py     prints the hash of the sources that a wheel is built from
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("infinity", "csrc", "CMakeLists.txt", "pyproject.toml")
PIP = ("-m", "pip", "--isolated", "--disable-pip-version-check")
"""Without the machine's variables for pip: constraints or a user's folder would refuse what is carried in."""
HASH_FILE = "infinity.sources"
"""Beside a wheel: the hash of its sources."""


def source_hash(root: Path = ROOT) -> str:
    """Return a hash of all files that a build reads."""
    total = hashlib.sha256()
    for path in sorted(_files(root)):
        total.update(f"{path.relative_to(root)}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _files(root: Path) -> Iterable[Path]:
    suffixes = {".py", ".pyi", ".cpp", ".cu", ".cuh", ".h", ".map", ".toml", ".txt"}
    for name in SOURCES:
        found = [root / name] if (root / name).is_file() else (root / name).rglob("*")
        yield from (path for path in found if path.is_file() and path.suffix in suffixes)


def carried_wheel(folder: Path, root: Path = ROOT) -> tuple[Path | None, str]:
    """Return the wheel of Infinity in a folder, or None and the reason; the reason is empty if there is no wheel.

    A wheel of other sources is left out, since a call measures the package of this tree.
    """
    tag = "cp{}{}".format(*sys.version_info[:2])
    wheels = sorted(folder.glob("infinity_engine-*.whl"))
    fitting = [wheel for wheel in wheels if f"-{tag}-" in wheel.name]
    if not fitting:
        return None, f"{wheels[-1].name} is for another Python than {tag}" if wheels else ""
    hash_file = folder / HASH_FILE
    if not hash_file.exists() or hash_file.read_text().strip() != source_hash(root):
        return None, f"{fitting[-1].name} was built from other sources"
    return fitting[-1], ""


def other_wheels(folder: Path) -> list[Path]:
    """Return the wheels of a folder, without Infinity's."""
    return sorted(path for path in folder.glob("*.whl") if not path.name.startswith("infinity_engine-"))


def install(site: Path, wheels: Sequence[Path]) -> list[str | Path]:
    """Return the command that installs wheels into a folder, without their dependencies."""
    pip: list[str | Path] = [sys.executable, *PIP, "install", "--quiet"]
    options: list[str | Path] = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    return [*pip, *options, "--target", site, *wheels]


def build(wheels: Path, architecture: str, root: Path = ROOT, *, kernels: bool = True) -> list[str | Path]:
    """Return the command that builds a wheel into a folder, with the installed packages.

    architecture: of the present device, such as "90"; empty: the build's default ones.
    """
    defines = [f"cmake.define.INFINITY_CUDA={'ON' if kernels else 'OFF'}"]
    if architecture and kernels:
        defines.append(f"cmake.define.INFINITY_CUDA_ARCHITECTURES={architecture}")
    pip: list[str | Path] = [sys.executable, *PIP, "wheel", "--no-index"]
    options: list[str | Path] = [
        "--no-build-isolation",
        "--no-deps",
        *(word for one in defines for word in ("-C", one)),
    ]
    return [*pip, *options, "--wheel-dir", wheels, root]


def architecture() -> str:
    """Return the device's compute capability without its dot, such as "90"; empty if nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.split("\n")[0].strip().replace(".", "") if done.returncode == 0 else ""


if __name__ == "__main__":
    print(source_hash())
