"""The command that a manifest records, and the folder in which it started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
os.chdir("/")
from infinity.durable.manifest import _start_folder
print(_start_folder())
"""


@pytest.mark.parametrize("script", ["train.py", "../here/train.py"])
def test_a_script_that_changes_its_folder_is_resumed_from_that_of_its_start(script: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / script).parent.mkdir(parents=True, exist_ok=True)
    here.mkdir(exist_ok=True)
    (here / script).write_text(SCRIPT)
    found = subprocess.run([sys.executable, script, "--run"], cwd=here, capture_output=True, text=True, check=True)
    assert os.path.samefile(found.stdout.strip(), here)


@pytest.mark.parametrize("flags", [["-m", "train"], ["{}/train.py"]], ids=["a module", "an absolute path"])
def test_without_a_relative_path_it_is_the_present_folder(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *(flag.format(tmp_path) for flag in flags), "train.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "/\n"


def test_torchrun_is_restarted_in_its_own_folder(tmp_path: Path) -> None:
    """The ranks are its children."""
    (tmp_path / "train.py").write_text(SCRIPT)
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
