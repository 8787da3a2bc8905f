"""Mutants of a toy package are served to its tests and their child processes, and judged by the tests' outcome."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mutants.__main__ import _MOST_CHANCES, Trials
from mutants.sites import Mutant, find
from mutants.table import Cache, Selections, key_of
from mutants.trial import Result, _judge, run

GUARD = """
import threading, time

class Box:
    def __init__(self):
        self.value = 0
        self.thread = threading.Thread(target=self.fill)

    def fill(self):
        time.sleep(0.3)
        self.value = 7

    def get(self):
        self.thread.start()
        self.thread.join()
        return self.value
"""

TESTS = {
    "test_sees.py": "from toy.box import Box\ndef test_value(): assert Box().get() == 7\n",
    "test_blind.py": "from toy.box import Box\ndef test_none(): Box().get()\n",
    "test_apart.py": "def test_nothing(): pass\n",
    "test_child.py": (
        "import subprocess, sys\n"
        "def test_child():\n"
        "    code = 'from toy.box import Box; raise SystemExit(Box().get() != 7)'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 0\n"
    ),
    "test_hangs.py": (
        "import time\nfrom toy.box import Box\n"
        "def test_for_ever():\n    if Box().get() != 7:\n        while True: time.sleep(1)\n"
    ),
    "test_dies.py": (
        "import os\nfrom toy.box import Box\ndef test_end():\n    if Box().get() != 7: os.kill(os.getpid(), 9)\n"
    ),
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/__init__.py").touch()
    (tmp_path / "toy/box.py").write_text(GUARD)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for child processes of the tests
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    return tmp_path


@pytest.fixture
def mutant(toy: Path) -> Mutant:
    (found,) = find(toy / "toy", ["box.py"])
    assert found.name == "box.py:Box.get:join#1"
    return found


@pytest.mark.parametrize(
    "test, outcome, named",
    [
        ("test_sees.py", "killed", "test_sees.py::test_value"),
        ("test_child.py", "killed", "test_child.py::test_child"),
        ("test_dies.py", "killed", "test_dies.py::test_end (exit status -9)"),
        ("test_blind.py", "survived", ""),
        ("test_apart.py", "unused", ""),
    ],
)
def test_a_mutant_is_judged(toy: Path, mutant: Mutant, test: str, outcome: str, named: str) -> None:
    result = run(toy, "toy.box", mutant.source, [test], timeout=60)
    assert (result.outcome, result.test) == (outcome, named)
    assert (toy / "toy/box.py").read_text() == GUARD


def test_the_source_as_it_is_passes(toy: Path, mutant: Mutant) -> None:
    assert run(toy, "toy.box", mutant.original, list(TESTS), timeout=60).outcome == "survived"


def test_tests_that_do_not_end(toy: Path, mutant: Mutant) -> None:
    """Tests that hang count as killed, and the result names the test that began last."""
    assert run(toy, "toy.box", mutant.source, ["test_hangs.py"], timeout=5).outcome == "timeout"
    said = "test_sees.py::test_value PASSED [ 50%]\ntest_hangs.py::test_for_ever[a b] "
    for end in ("", "+++++ Timeout +++++\n~~~~~ Stack ~~~~~"):
        assert _judge(1 if end else None, said + end, served=True) == ("timeout", "test_hangs.py::test_for_ever[a b]")


def test_tests_that_cannot_be_run(toy: Path, mutant: Mutant) -> None:
    result = run(toy, "toy.box", mutant.source, ["test_of_another_name.py"], timeout=60)
    assert result.outcome == "broken" and "test_of_another_name" in result.test


def test_the_first_test_that_fails_ends_it(toy: Path, mutant: Mutant) -> None:
    result = run(toy, "toy.box", mutant.source, ["test_blind.py", "test_sees.py", "test_hangs.py"], timeout=60)
    assert (result.outcome, result.test) == ("killed", "test_sees.py::test_value")


@pytest.mark.parametrize(
    "by_chance, always, expected",
    [
        (0, "b", ("killed", "b::t")),
        (2, "b", ("killed", "b::t")),
        (1, "", ("chance", "c0::t")),
        (0, "", ("survived", "")),
        (_MOST_CHANCES + 1, "b", ("chance", f"c{_MOST_CHANCES}::t")),
    ],
)
def test_a_test_that_fails_by_chance_hides_no_other(
    mutant: Mutant, tmp_path: Path, by_chance: int, always: str, expected: tuple[str, str]
) -> None:
    class Chances(Trials):
        def _run(self, mutant: Mutant, tests: Sequence[str], without: Sequence[str] = ()) -> Result:
            if list(tests) != ["all"]:  # alone
                return Result("killed" if always and tests == [f"{always}::t"] else "survived", "", 1.0)
            failing = [f"c{number}::t" for number in range(by_chance)] + [f"{always}::t"] * bool(always)
            left = [test for test in failing if f"--deselect={test}" not in without]
            return Result("killed", left[0], 1.0) if left else Result("survived", "", 1.0)

    trials = Chances(Selections({"box.py": ["all"]}), Cache(tmp_path / "cache"), fresh=True, timeout=1)
    result = trials._result(mutant, ["all"])
    assert (result.outcome, result.test) == expected


def test_results_are_kept_until_a_test_changes(toy: Path, mutant: Mutant) -> None:
    cache = Cache(toy / "build/results.json")
    key = key_of(mutant, toy, ["test_sees.py"])
    assert cache.get(key) is None
    cache.put(key, Result("killed", "test_sees.py::test_value", 1.0))
    cache.put("another", Result("broken", "no pytest", 1.0))
    again = Cache(toy / "build/results.json")
    assert again.get(key) == Result("killed", "test_sees.py::test_value", 1.0) and again.get("another") is None
    (toy / "test_sees.py").write_text(TESTS["test_sees.py"] + "# changed\n")
    assert key_of(mutant, toy, ["test_sees.py"]) != key
