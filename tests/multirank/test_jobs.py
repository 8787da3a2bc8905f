"""Whole jobs of two processes, one of which fails: messages and exit statuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.comm.stuck import EXIT_STATUS

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


@pytest.mark.campaign
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), how],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=100)[1]
        if statuses[1] is not None:
            ranks[1].wait(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert re.search(rf"rank 1 \(host .+, pid {ranks[1].pid}\) ", said), said
    assert re.search(cause, said, re.S), said
    assert ranks[0].returncode == statuses[0]
    assert statuses[1] in (None, ranks[1].returncode)
    assert os.listdir(folder) == []
