"""requirements/develop.txt: hashes of the versions that constraints.txt pins. requirements/run.txt is a part of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements" / "develop.txt").read_text(encoding="utf-8")


RUN = (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8")


def blocks(text: str) -> set[str]:
    return set(re.split(r"\n(?=[a-z0-9])", text.rstrip("\n"))[1:])


def pinned(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", text, re.MULTILINE))


def test_versions_are_those_of_the_constraints() -> None:
    assert pinned(LOCK) <= pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def test_every_version_has_a_hash() -> None:
    for block in re.split(r"\n(?=[a-z0-9])", LOCK)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block.splitlines()[0]


def test_torch_and_its_builds_are_left_to_users() -> None:
    assert not {name for name, _ in pinned(LOCK) if name == "torch" or name.startswith(("nvidia", "triton", "cuda"))}
    assert "://" not in LOCK


def test_dependencies_of_the_package_are_there() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["plots"], *extras["lint"]]
    names = {re.split(r"[^a-z0-9-]", each.lower())[0] for each in wanted} - {"torch"}
    assert names <= {name for name, _ in pinned(LOCK)}


def test_requirements_of_make_run_are_a_part_of_the_others() -> None:
    assert blocks(RUN) < blocks(LOCK)


def test_requirements_of_make_run_are_complete() -> None:
    """Dependencies of the package and of its build, and theirs, are there or come with torch."""
    tomllib = pytest.importorskip("tomllib")
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    names, seen = {name for name, _ in pinned(RUN)} | {"torch"}, set()
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], "cmake", "ninja"]
    while wanted:
        requirement = wanted.pop()
        name = re.split(r"[^a-z0-9-]", requirement.lower())[0]
        if name in seen or name == "torch" or re.search("extra ==|Windows|win32", requirement):
            continue
        seen.add(name)
        assert name in names, requirement
        try:
            wanted += metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # needed on another Python
            assert "python_" in requirement


def test_make_run_installs_no_tools_of_development(tmp_path: Path) -> None:
    """Beside an environment that make install completed, make run keeps it complete."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")

    def commands() -> str:
        return subprocess.run([make, "-n", "run", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True).stdout

    assert "requirements/run.txt" in commands() and "requirements/develop.txt" not in commands()
    (tmp_path / ".installed").touch()
    assert "requirements/run.txt" not in commands() and "requirements/develop.txt" in commands()
