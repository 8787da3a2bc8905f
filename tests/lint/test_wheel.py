"""lint/wheel.py: accepts the files of a good wheel and sdist, and names each fault of a bad one."""

from __future__ import annotations

import importlib.util
import re
import tarfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("lint_wheel", ROOT / "lint" / "wheel.py")
assert spec is not None and spec.loader is not None
lint_wheel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lint_wheel)

NAMES = [pattern.replace("*", "0") for pattern in lint_wheel.IN_WHEEL]


def metadata(**changes: str) -> Message:
    message = Message()
    for key, value in {"License-Expression": "Apache-2.0", "Requires-Python": ">=3.10", **changes}.items():
        message[key] = value
    for extra in ("docs", "hjson", "integrations", "lint", "plots", "test"):
        message["Provides-Extra"] = extra
    message["Classifier"] = "Typing :: Typed"
    message.set_payload("# Infinity\n")
    return message


def test_a_complete_wheel_has_no_faults() -> None:
    assert list(lint_wheel.wheel_problems(NAMES, metadata())) == []


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_is_named(missing: str) -> None:
    faults = lint_wheel.wheel_problems([name for name in NAMES if name != missing], metadata())
    assert [fault.replace("*", "0") for fault in faults] == [f"{missing} is missing"]


@pytest.mark.parametrize(
    "foreign",
    [
        "tests/conftest.py",
        "infinity/native/adam.cpp",
        "bench/results/step.json",
        "infinity/__pycache__/a.pyc",
        "docs.md",
    ],
)
def test_a_foreign_file_is_named(foreign: str) -> None:
    assert list(lint_wheel.wheel_problems([*NAMES, foreign], metadata())) == [f"{foreign} does not belong into a wheel"]


def test_other_metadata_are_named() -> None:
    faults = list(lint_wheel.wheel_problems(NAMES, metadata(**{"Requires-Python": ">=3.9"})))
    assert faults == ["Requires-Python is '>=3.9', not '>=3.10'"]


@pytest.mark.campaign  # builds a distribution
def test_the_sdist_of_this_tree_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    sdist = tmp_path / build.build_sdist(str(tmp_path))
    assert lint_wheel.problems(sdist) == []
    with tarfile.open(sdist) as archive:
        assert len([name for name in archive.getnames() if "/csrc/" in name]) > 50


def test_make_installs_the_extra_docs() -> None:
    """Tools are installed apart from the package, so the Makefile repeats what the extra lists."""
    (listed,) = re.findall(r"^TOOLS_docs = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (extra,) = re.findall(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed.replace("'", "").split() == extra.replace('"', "").split(", ")


@pytest.mark.parametrize("extra", ["docs", "hjson", "integrations", "lint", "plots", "test"])
def test_packages_of_extras_are_pinned(extra: str) -> None:
    (listed,) = re.findall(rf"^{extra} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name.partition("[")[0] for name in listed.replace('"', "").split(", ")} <= pinned
