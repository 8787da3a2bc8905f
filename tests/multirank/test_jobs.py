"""Whole jobs of two processes, one of which fails: messages and exit statuses."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from infinity.comm.liveness.processes import EXIT_STATUS
from support.jobs import run_job

SCRIPT = """
import os, resource, signal, sys
import torch, torch.distributed as dist
import infinity
from infinity.tiers.device import CpuDevice
from support.configs import engine_config
from support.models import Stack, seeded, token_batches

def fill_memory():
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (4 << 30),) * 2)
    blocks = []
    while True:
        blocks.append(bytearray(64 << 20))

folder, how = sys.argv[1:]
torch.set_num_threads(1)
engine = infinity.initialize(seeded(Stack), engine_config(folder=folder, rank_timeout=2), device=CpuDevice())[0]
for number, batch in enumerate(token_batches(6)):
    if os.environ["RANK"] == "1" and number == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "memory":
            fill_memory()
        if how == "raises":
            raise ValueError("the user's own")
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    if how == "stopped" and number == 1 and os.environ["RANK"] == "0":
        dist.all_reduce(loss.detach())
"""


@pytest.mark.campaign(few=2)
@pytest.mark.parametrize(
    ("how", "statuses", "cause"),
    [
        (
            "killed",
            (1, -signal.SIGKILL),
            r"RanksError: .* is lost: it was killed by signal 9 \(SIGKILL\)",
        ),
        ("raises", (1, 1), r"RanksError: .* failed: ValueError: the user's own\. Fix"),
        ("memory", (1, 1), r"RanksError: .* failed: MemoryError"),
        ("stopped", (EXIT_STATUS, None), rf".* this process ends with exit status {EXIT_STATUS}"),
    ],
)
def test_one_of_two_processes(how: str, statuses: tuple[int, int | None], cause: str, tmp_path: Path) -> None:
    """The other one prints the first one's name and the cause and ends soon, also in a collective of the script's own.

    Errors are not caught, and engines not closed.
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    first, second = run_job(SCRIPT, 2, str(folder), how, stopped=1 if statuses[1] is None else None)
    assert re.search(rf"rank 1 \(host .+, pid {second.pid}\) ", first.said), first.said
    assert re.search(cause, first.said, re.S), first.said
    assert first.status == statuses[0]
    assert statuses[1] in (None, second.status)
    assert os.listdir(folder) == []
