"""Jobs of several ranks, each a process that runs a script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple


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
