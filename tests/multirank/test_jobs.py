"""Whole jobs of two or four processes, one of which fails: messages and exit statuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

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


TENSOR_PARALLEL = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import infinity
from infinity.tiers.device import CpuDevice
from multirank.mesh_cases import divided
from support.configs import engine_config
from support.models import token_batches

folder, how = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model, config = divided(mesh["tp"]), engine_config(folder=folder, rank_timeout=2)
engine = infinity.initialize(model, config, device=CpuDevice(), process_group=mesh["dp"])[0]
for number, batch in enumerate(token_batches(6)):
    if os.environ["RANK"] == "3" and number == 2:
        if how == "raises":
            raise ValueError("the user's own")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    engine.backward(engine(*batch))
    engine.step()
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
    first, second = run_job(SCRIPT, 2, str(folder), how, stopped=1 if statuses[1] is None else None)
    assert re.search(rf"rank 1 \(host .+, pid {second.pid}\) ", first.said), first.said
    assert re.search(cause, first.said, re.S), first.said
    assert first.status == statuses[0]
    assert statuses[1] in (None, second.status)
    assert os.listdir(folder) == []


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["killed", "raises", "stopped"])
def test_one_of_four_tensor_parallel_processes(how: str, tmp_path: Path) -> None:
    """All others end soon. Ranks 1 and 2 share a heartbeat with rank 3; rank 0 has the cause from them."""
    causes = {"killed": "is lost: it was killed by", "raises": "failed: ValueError", "stopped": "has not responded"}
    *others, last = run_job(TENSOR_PARALLEL, 4, str(tmp_path), how, stopped=3 if how == "stopped" else None)
    for each in others:
        assert each.status in (1, EXIT_STATUS), each.said
        assert re.search(rf"rank 3 \(host .+, pid {last.pid}\) {causes[how]}", each.said), each.said
    assert os.listdir(tmp_path) == []


class Ended(NamedTuple):
    """A process: its exit status, what it wrote to stderr, and its number."""

    status: int
    said: str
    pid: int


def run_job(script: str, size: int, *arguments: str, stopped: int | None) -> list[Ended]:
    """Run `script` on `size` ranks until all end; the one that is `stopped` is killed then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=file,
            )
            for rank, file in enumerate(files)
        ]
        try:
            deadline = time.monotonic() + 100
            for rank, process in enumerate(ranks):
                if rank != stopped:
                    process.wait(deadline - time.monotonic())
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        for file in files:
            file.seek(0)
        return [Ended(rank.returncode, file.read(), rank.pid) for rank, file in zip(ranks, files, strict=True)]
