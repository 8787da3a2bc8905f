"""The command that a manifest records, and the folder in which it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from infinity.durable.command import start_folder

SCRIPT = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps([sys.orig_argv, main.__file__, main.__spec__ is not None]))
"""
WITH_TORCHRUN = """
import os
os.chdir("/")
from infinity.durable.command import start_folder
print(start_folder())
"""


def found_by(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder that a process finds which starts in `folder` and then changes to /: its values are taken over
    here, where the package is imported.
    """
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    arguments, file, is_module = json.loads(ran.stdout)
    main = ModuleType("__main__")
    main.__file__ = file
    monkeypatch.setattr(main, "__spec__", main if is_module else None)
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.chdir("/")
    return start_folder()


@pytest.mark.parametrize("script", ["train.py", "./train.py", "code/train.py", "../here/train.py"])
def test_a_script_that_changes_its_folder_is_resumed_from_that_of_its_start(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / script).parent.mkdir(parents=True, exist_ok=True)
    here.mkdir(exist_ok=True)
    (here / script).write_text(SCRIPT)
    assert os.path.samefile(found_by([sys.executable, script, "--run"], here, monkeypatch), here)


@pytest.mark.parametrize("flags", [["-m", "train"], ["{}/train.py"]], ids=["a module", "an absolute path"])
def test_without_a_relative_path_it_is_the_present_folder(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *(flag.format(tmp_path) for flag in flags), "train.py"]
    assert found_by(command, tmp_path, monkeypatch) == "/"


def test_torchrun_is_restarted_in_its_own_folder(tmp_path: Path) -> None:
    """The ranks are its children."""
    (tmp_path / "train.py").write_text(WITH_TORCHRUN)
    parent = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], cwd='/').returncode)"
    found = subprocess.run(
        [sys.executable, "-c", parent, str(tmp_path / "train.py")],
        cwd=tmp_path,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert os.path.samefile(found.stdout.strip(), tmp_path)
