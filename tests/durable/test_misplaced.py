"""Files of a durable run that are removed, renamed or replaced while it trains, by real system calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from durable.test_resume import STEPS, assert_resumes, go_on, model, uninterrupted
from infinity.durable.folder import Lock
from infinity.engine.training import TrainingEngine
from infinity.errors import StorageError
from support.configs import engine_config
from support.loops import Result, assert_same, open_engine, parameters_of

FOLDER = "run/0001"
STATES, MANIFEST, LOCK = f"{FOLDER}/rank-00000.states", f"{FOLDER}/rank-00000.json", "run/rank-00000.lock"
RECORDS = [f"{FOLDER}/rank-00000.record-{slot}" for slot in (0, 1)]
Change = Callable[[Path], object]


@cache
def undisturbed(**options: Any) -> Result:
    return uninterrupted(engine_config(**options))


def opened(folder: Path | list[Path], **options: Any) -> TrainingEngine:
    engine = open_engine(model(), engine_config(folder=folder, durable=True, **options))
    torch.manual_seed(1)
    return engine


def commit(engine: TrainingEngine) -> None:
    engine.settle()
    assert engine.updates.durable is not None
    engine.updates.durable.wait()


def once_committed(engine: TrainingEngine, change: Callable[[], object]) -> Callable[[int], None]:
    """Return a function that changes files after step 2, once it is committed."""

    def then(number: int) -> None:
        if number == 2:
            commit(engine)
            change()

    return then


def until_refused(engine: TrainingEngine, change: Callable[[], object]) -> tuple[str, int]:
    """Train, and change files once step 2 is committed. Returns the error and the number of steps."""
    with pytest.raises(StorageError, match="was not committed") as caught:
        go_on(engine, 0, STEPS, once_committed(engine, change))
    return str(caught.value), engine.global_steps


def closed(engine: TrainingEngine) -> None:
    """Close an engine whose last step cannot be committed either."""
    with pytest.raises(StorageError, match="was not committed"):
        engine.close()


def replaced(path: Path) -> None:
    """Put a copy in the place of a file, as an editor or `rsync` does."""
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def copied_and_moved(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"))
    moved(path)
    path.with_name("copy").rename(path)


LOST: dict[str, tuple[Change, str]] = {
    "states unlinked": (lambda nvme: os.unlink(nvme / STATES), r"rank-00000\.states was removed"),
    "states renamed": (lambda nvme: moved(nvme / STATES), r"rank-00000\.states was moved to .*0001/elsewhere"),
    "states replaced": (lambda nvme: replaced(nvme / STATES), "was removed while the run trained, and another file"),
    "states cut short": (lambda nvme: cut(nvme / STATES), r"was cut to [\d,]+ bytes of [\d,]+ "),
    "generation renamed": (lambda nvme: moved(nvme / FOLDER), r"was moved to .*run/elsewhere/rank-00000\.states"),
    "run renamed": (lambda nvme: moved(nvme / "run"), r"was moved to .*elsewhere/0001/rank-00000\.states"),
    "run replaced by its copy": (lambda nvme: copied_and_moved(nvme / "run"), "was moved to .* and another file"),
    "run removed": (lambda nvme: shutil.rmtree(nvme / "run"), r"rank-00000\.states was removed"),
    "nvme_path renamed": (moved, r"was moved to .*elsewhere/run/0001"),
}


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("change", "problem"), LOST.values(), ids=LOST)
def test_a_commit_that_nothing_would_find_is_one_error_and_no_step_is_lost(
    change: Change, problem: str, nvme: Path, tmp_path: Path
) -> None:
    """The next step raises the error, which names file and fix; the states can be saved and loaded."""
    expected = undisturbed()
    engine = opened(nvme)
    text, steps = until_refused(engine, lambda: change(nvme))
    assert steps == 4 and f"step 3 was not committed to {nvme / 'run'}: " in text
    assert "engine.save_checkpoint(directory)" in text
    assert re.search(problem, text), text
    if "cut" not in text:  # bytes of the states are gone then
        engine.save_checkpoint(tmp_path / "saved", client_state={"next": steps})
        closed(engine)
        nvme.mkdir(exist_ok=True)
        with open_engine(model(), engine_config(folder=nvme, durable=True, run="next")) as engine:
            _, state = engine.load_checkpoint(tmp_path / "saved")
            losses = go_on(engine, state["next"], STEPS)
            found = Result([*losses, *engine.module.seen.tolist()], parameters_of(engine))
        assert_same(found, Result(expected.losses[steps:], expected.parameters))
    else:
        closed(engine)


@pytest.mark.parametrize(
    ("param", "optim", "options"),
    [("cpu", "nvme", {}), ("cpu", "cpu", {"clip": 0.5}), ("none", "none", {"update": "after_backward"})],
)
def test_states_in_every_tier_are_saved_after_it(
    param: str, optim: str, options: dict[str, Any], nvme: Path, tmp_path: Path
) -> None:
    placed: dict[str, Any] = {"param": param, "optim": optim, **options}
    expected = undisturbed(**placed)
    engine = opened(nvme, **placed)
    _, steps = until_refused(engine, lambda: os.unlink(nvme / STATES))
    engine.save_checkpoint(tmp_path / "saved", background=True)
    assert engine.saving is not None
    engine.saving.wait()
    closed(engine)
    with open_engine(model(), engine_config(folder=nvme, **placed)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        losses = go_on(engine, steps, STEPS)
        found = Result([*losses, *engine.module.seen.tolist()], parameters_of(engine))
    assert_same(found, Result(expected.losses[steps:], expected.parameters))


@pytest.mark.filterwarnings("ignore:.* are on one file system")
@pytest.mark.parametrize("number", [0, 1])
def test_each_file_of_a_stripe_is_checked(number: int, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    engine = opened(folders)
    path = folders[number] / (STATES if number == 0 else f"{STATES}-1")
    text, _ = until_refused(engine, path.unlink)
    assert f"{path} was removed" in text
    closed(engine)


@pytest.mark.parametrize("of", ["run", FOLDER, STATES])
def test_files_that_are_moved_back_are_committed_again(of: str, nvme: Path) -> None:
    expected = undisturbed()
    engine = opened(nvme)
    until_refused(engine, lambda: moved(nvme / of))
    commit(engine)
    (nvme / of).with_name("elsewhere").rename(nvme / of)
    with pytest.raises(StorageError, match="step 4 was not committed"):
        go_on(engine, 4, 5)
    assert go_on(engine, 5, STEPS) == expected.losses[5:STEPS]
    engine.close()
    assert assert_resumes(nvme, expected.losses, STEPS, expected) == STEPS


def test_a_kill_after_files_are_moved_away_loses_no_commit(nvme: Path) -> None:
    """Updates go on in the slots that are not committed."""
    expected = undisturbed()
    engine = opened(nvme)
    _, steps = until_refused(engine, lambda: moved(nvme / "run"))
    for number in range(steps, steps + 2):
        with pytest.raises(StorageError, match="was not committed"):
            go_on(engine, number, number + 1)
    shutil.copytree(nvme / "elsewhere", nvme / "run")  # the process that holds the other one is as good as killed
    closed(engine)
    shutil.rmtree(nvme / "elsewhere")
    assert assert_resumes(nvme, expected.losses, 2, expected) == 2


HEALED: dict[str, Change] = {
    "the last record removed": lambda nvme: os.unlink(nvme / RECORDS[0]),
    "the record before removed": lambda nvme: os.unlink(nvme / RECORDS[1]),
    "both records removed": lambda nvme: [os.unlink(nvme / each) for each in RECORDS],
    "a record replaced": lambda nvme: replaced(nvme / RECORDS[1]),
    "the manifest removed": lambda nvme: os.unlink(nvme / MANIFEST),
    "the manifest replaced": lambda nvme: replaced(nvme / MANIFEST),
    "the manifest emptied": lambda nvme: os.truncate(nvme / MANIFEST, 0),
    "the lock removed": lambda nvme: os.unlink(nvme / LOCK),
    "the lock replaced": lambda nvme: replaced(nvme / LOCK),
    "all but the states removed": lambda nvme: [os.unlink(nvme / each) for each in (*RECORDS, MANIFEST, LOCK)],
}


@pytest.mark.parametrize("change", HEALED.values(), ids=HEALED)
def test_small_files_are_written_again(change: Change, nvme: Path) -> None:
    """The process has their contents in memory, so the next commit restores them, with the lock."""
    expected = undisturbed()

    engine = opened(nvme)
    losses = go_on(engine, 0, 4, once_committed(engine, lambda: change(nvme)))
    commit(engine)
    with pytest.raises(StorageError, match="in use by another process"):
        Lock(nvme / "run", 0)
    engine.close()
    assert assert_resumes(nvme, losses, 4, expected) == 4


def test_a_lock_that_another_process_has_taken_ends_the_run(nvme: Path) -> None:
    """Two processes would write the same files otherwise."""
    script = (
        "import fcntl, os, sys; held = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(held, fcntl.LOCK_EX); print(flush=True); input()"
    )
    others: list[subprocess.Popen[str]] = []

    def taken() -> None:
        os.unlink(nvme / LOCK)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        others.append(subprocess.Popen([sys.executable, "-c", script, str(nvme / LOCK)], **pipes))
        assert others[0].stdout is not None and others[0].stdout.readline() == "\n"

    engine = opened(nvme)
    try:
        with pytest.raises(StorageError, match=r"step 3 could not be committed .* in use by another process"):
            go_on(engine, 0, STEPS, once_committed(engine, taken))
        engine.close()
    finally:
        for other in others:
            other.communicate("\n", timeout=60)


def test_the_end_of_a_run_raises_if_its_last_step_is_lost(nvme: Path) -> None:
    """No later step can raise the error, so `close` does."""
    engine = opened(nvme)
    go_on(engine, 0, 2)
    commit(engine)
    os.unlink(nvme / STATES)
    go_on(engine, 2, 3)
    with pytest.raises(StorageError, match="step 3 was not committed"):
        engine.close()
