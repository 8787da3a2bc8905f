"""`infinity resume`: refuses what it must not execute, and tells whether a run's last commit is intact."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import infinity
from infinity.cli import convert
from infinity.cli.main import app
from infinity.durable.manifest import read_manifest
from infinity.durable.record import read_record, write_record

STEPS = 3
MANIFEST, STATES, RECORD = "0001/rank-00000.json", "0001/rank-00000.states", "0001/rank-00000.record-1"


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["resume", *map(str, arguments)])


def checked(run: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and stderr of a check."""
    result = invoke(run, "--check", "--json")
    return result.exit_code, json.loads(result.stdout), result.stderr


def train(folders: list[str]) -> None:
    place = {"device": "nvme", "nvme_path": folders}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"offload_param": place, "offload_optimizer": place},
        "infinity": {"durable": True, "run": "small"},
    }
    engine = infinity.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step(client_state={"step": step})
    engine.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvme")
    train([str(folder)])
    return folder / "small"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The folder of a run that has ended after `STEPS` steps."""
    return Path(shutil.copytree(trained, tmp_path / "small"))


def test_check_of_an_intact_run(run: Path) -> None:
    assert checked(run) == (0, {"run": "small", "step": STEPS, "ranks": 1, "intact": True}, "")
    result = invoke(run, "--check")
    assert result.exit_code == 0 and "run small, rank 0: step 3 is the last committed one; intact" in result.stdout


def test_check_reads_the_states_of_every_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with pytest.warns(RuntimeWarning, match="are on one file system"):
        train([str(folder) for folder in folders])
    assert checked(folders[0] / "small")[0] == 0
    path = folders[1] / "small" / f"{STATES}-1"
    path.unlink()
    status, facts, error = checked(folders[0] / "small")
    assert status == 1 and not facts["intact"] and f"{path}: No such file" in error


def cut(run: Path) -> None:
    os.truncate(run / STATES, 4096)


def flip(run: Path) -> None:
    for name in (RECORD, RECORD.replace("-1", "-0")):
        content = bytearray((run / name).read_bytes())
        content[-1] ^= 1
        (run / name).write_bytes(content)


def without_states(run: Path) -> None:
    (run / STATES).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "has 4,096 bytes instead of "),
        (without_states, "No such file"),
        (flip, ""),
    ],
)
def test_check_of_a_damaged_run(damage: Callable[[Path], None], message: str, run: Path) -> None:
    damage(run)
    status, facts, error = checked(run)
    assert status == 1 and not facts["intact"] and message in error


def test_check_names_ranks_that_have_no_files_here(run: Path) -> None:
    manifest = read_manifest(run / MANIFEST)
    assert manifest is not None
    (run / MANIFEST).write_text(replace(manifest, layout={**manifest.layout, "ranks": 3}).to_json())
    status, facts, error = checked(run)
    assert status == 1 and facts == {"run": "small", "step": STEPS, "ranks": 3, "intact": False}
    assert "ranks 1, 2: no files on this machine" in error


def writable_run(run: Path) -> None:
    run.chmod(0o720)


def writable_generation(run: Path) -> None:
    (run / "0001").chmod(0o702)


def writable_manifest(run: Path) -> None:
    (run / MANIFEST).chmod(0o620)


def linked_manifest(run: Path) -> None:
    (run / MANIFEST).rename(run / "elsewhere")
    (run / MANIFEST).symlink_to(run / "elsewhere")


def of_another_user(run: Path) -> None:
    os.chown(run / MANIFEST, 12345, -1)


def no_manifest(run: Path) -> None:
    (run / MANIFEST).write_text("{}")


def lost_manifest(run: Path) -> None:
    (run / MANIFEST).unlink()


def no_run(run: Path) -> None:
    shutil.rmtree(run / "0001")


def no_folder(run: Path) -> None:
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (writable_run, "other users may write"),
        (writable_generation, "other users may write"),
        (writable_manifest, "other users may write"),
        (linked_manifest, "is a link"),
        pytest.param(
            of_another_user,
            "belongs to another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        (no_manifest, "all manifests in"),
        (lost_manifest, "no manifest (rank-*.json). If it was lost, restore it from a copy. Otherwise pass NVME_PATH"),
        (no_run, "is not the folder of a durable run"),
        (no_folder, "No such file or directory"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_folder_that_others_may_have_written_is_refused(
    change: Callable[[Path], None], message: str, flags: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert.os, "execv", lambda *_: pytest.fail("a command was executed"))
    change(run)
    result = invoke(run, *flags)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_run_in_use_is_refused(run: Path) -> None:
    with open(run / "rank-00000.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = invoke(run)
    assert result.exit_code == 2 and f"{run} is in use by another process" in result.stderr


def recorded(run: Path, **changes: Any) -> None:
    manifest = read_manifest(run / MANIFEST)
    assert manifest is not None
    (run / MANIFEST).write_text(replace(manifest, **{"runs": (str(run),), **changes}).to_json())


def test_the_command_is_printed_and_executed_in_its_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[Any] = []
    monkeypatch.chdir(tmp_path)  # restored after the test
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(convert.os, "execv", lambda *command: executed.append((*command, os.getcwd())))
    command = (sys.executable, "train.py", "--name", "two words", "\x1b[2J")
    recorded(run, command=command, folder="/")
    result = invoke(run)
    assert executed == [(sys.executable, command, "/")]
    assert "note: in /: " in result.stderr and "'two words'" in result.stderr and "\x1b" not in result.stderr


@pytest.mark.parametrize("original", ["", "nowhere"], ids=["a copy", "moved"])
def test_a_copy_is_not_resumed_in_place_of_its_original(
    original: str, run: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command would train the original, or start anew if that is gone."""
    monkeypatch.setattr(convert.os, "execv", lambda *_: pytest.fail("a command was executed"))
    recorded(run, runs=(str(trained / original),))
    result = invoke(run)
    assert result.exit_code == 2
    assert f"{run} is a copy of a run in {trained / original}" in " ".join(result.stderr.split())
    assert checked(run)[0] == 0


def test_a_run_is_resumed_by_another_path(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(convert.os, "execv", lambda *command: executed.append(command))
    (tmp_path / "drive").symlink_to(tmp_path)
    recorded(run, runs=(str(tmp_path / "drive" / "small"),))
    invoke(run)
    assert len(executed) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ("/nowhere/python", "train.py")}, "/nowhere/python, the program of the run, does not exist"),
        ({"folder": "/nowhere"}, "the working directory /nowhere does not exist"),
    ],
)
def test_a_command_that_does_not_exist_is_an_error(
    changes: dict[str, Any], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    recorded(run, **changes)
    result = invoke(run)
    assert result.exit_code == 2 and message in result.stderr


def test_check_of_a_run_whose_first_commit_some_ranks_lack(run: Path) -> None:
    """Such a run begins anew, or goes on from the generation before."""
    folder = run / RECORD
    record = read_record(folder)
    assert record is not None and record.number == STEPS
    generation = run / "0002"
    generation.mkdir(mode=0o700)
    manifest = read_manifest(run / "0001" / "rank-00000.json")
    assert manifest is not None
    two = replace(manifest, layout={**manifest.layout, "ranks": 2}, has_commit=False)
    for rank in range(2):
        (generation / f"rank-{rank:05d}.json").write_text(two.to_json())
        (generation / f"rank-{rank:05d}.json").chmod(0o600)
    write_record(generation / "rank-00000.record-1", replace(record, number=1))
    assert checked(run) == (0, {"run": "small", "step": STEPS, "ranks": 1, "intact": True}, "")


def test_check_of_a_copy_that_was_made_while_the_run_trained(tmp_path: Path) -> None:
    """The states of step 1 and the record of step 3 are files of the right sizes."""
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"offload_param": place, "offload_optimizer": place},
        "infinity": {"durable": True, "run": "small", "update": "after_backward"},
    }
    engine = infinity.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        if step == 0:
            shutil.copy2(tmp_path / "small" / STATES, tmp_path / "states")
    engine.close()
    run = tmp_path / "small"
    assert checked(run)[0] == 0
    shutil.copy2(tmp_path / "states", run / STATES)
    status, facts, error = checked(run)
    assert status == 1 and facts == {"run": "small", "step": STEPS, "ranks": 1, "intact": False}
    assert "rank 0: the parameters of unit " in error and f"are not those of commit {STEPS}" in error
    assert "Copy them again while no process trains the run" in error
