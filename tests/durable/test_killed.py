"""Runs that a signal ends, as processes of their own: they go on bit-identical to a run that nothing ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from durable import trained
from infinity.cli.main import app

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("trained.py")
STEPS = 8
pytestmark = pytest.mark.timeout(600)  # longer than the processes of one test may take
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(ranks: int, *flags: str, **arguments: Any) -> subprocess.Popen[str]:
    launcher = [*TORCHRUN, *flags] if ranks > 1 else []
    return process([sys.executable, *launcher, str(SCRIPT), json.dumps(arguments)])


def process(command: Sequence[str]) -> subprocess.Popen[str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    # torch 2.13 shares the launcher's store, in which restarted ranks find gloo's addresses of the former ones.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"  # for `ended`
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process that may not hang. Returns its exit status and stderr, where each process tells its stacks
    if it does hang.
    """
    try:
        _, error = started.communicate(timeout=160)
    except subprocess.TimeoutExpired:
        hanging = (*psutil.Process(started.pid).children(recursive=True), started)  # ranks have other groups
        for number in (signal.SIGABRT, signal.SIGKILL):
            for child in hanging:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
            sleep(2)
        _, error = started.communicate(timeout=10)
        raise AssertionError(f"it hangs:\n{error}") from None
    return started.returncode, error


def losses(folder: Path, rank: int) -> dict[int, str]:
    """Step → loss; one that was trained twice must have had the same loss."""
    found: dict[int, str] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss, _ = line.split()
        assert found.setdefault(int(step), loss) == loss, f"step {step} differs when it is trained again"
    return found


def check_equal(folder: Path, whole: Path, ranks: int) -> None:
    for rank in range(ranks):
        assert losses(folder, rank) == losses(whole, rank)
        got, want = (torch.load(each / f"values-{rank}.pt") for each in (folder, whole))
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def resume(run: Path) -> subprocess.Popen[str]:
    return process([sys.executable, "-m", "infinity.cli.main", "resume", str(run)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of ranks → the folder of a run that nothing ended, without durable states."""

    @cache
    def train(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        if ranks == 1:
            trained.train(str(folder), STEPS, durable=False)
            return folder
        status, error = ended(start(ranks, folder=str(folder), steps=STEPS, durable=False))
        assert status == 0, error
        return folder

    return train


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_sigterm_commits_the_step_and_resume_goes_on(ranks: int, whole: Callable[[int], Path], tmp_path: Path) -> None:
    """All ranks stop after the same step, though one of them is asked."""
    send = {"at": 3, "rank": ranks - 1, "signal": signal.SIGTERM, "once": str(tmp_path / "sent")}
    status, error = ended(start(ranks, folder=str(tmp_path), steps=STEPS, durable=True, send=send))
    if ranks == 1:
        assert status == 128 + signal.SIGTERM and error.count("Traceback") == 0, error
    else:  # torchrun's own status; each rank's is in its report
        assert status == 1 and "exitcode  : 143" in error, error
    (stopped,) = {max(losses(tmp_path, rank)) for rank in range(ranks)}
    assert stopped == 3 or (ranks == 2 and stopped == 4)  # agreed in the commit of step 2 or 3

    checked = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--check", "--json"])
    assert json.loads(checked.stdout) == {"run": "run", "step": stopped + 1, "ranks": ranks, "intact": True}
    status, error = ended(resume(tmp_path / "run"))
    assert status == 0 and str(SCRIPT) in error, error
    check_equal(tmp_path, whole(ranks), ranks)
    for rank in range(ranks):
        lines = (tmp_path / f"losses-{rank}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(STEPS))


@pytest.mark.campaign(few=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_after_a_killed_rank(rank: int, whole: Callable[[int], Path], tmp_path: Path) -> None:
    send = {"at": 4, "rank": rank, "signal": signal.SIGKILL, "once": str(tmp_path / "sent")}
    started = start(2, "--max-restarts", "3", folder=str(tmp_path), steps=STEPS, durable=True, send=send)
    status, error = ended(started)
    assert status == 0, error
    check_equal(tmp_path, whole(2), 2)
    lines = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
    again = [int(step) for step, _, restart in lines if restart != "0"]
    assert again and again[0] >= 3, "the run began anew instead of going on"
