"""requirements/develop.txt: hashes of the versions that constraints.txt pins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements" / "develop.txt").read_text(encoding="utf-8")


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
