"""Ranks that are lost, busy, or stopped and continued. They run in the processes of a `support.ranks.Group`."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch.distributed as dist

from infinity.comm.communicator import Communicator
from infinity.errors import RanksError
from infinity.tiers.device import CpuDevice

TIMEOUT = 1.0
LONGER = 2.0
"""Seconds; more than the timeout."""


@contextmanager
def _ranks() -> Iterator[Communicator]:
    ranks = Communicator(CpuDevice(), rank_timeout=TIMEOUT)
    with closing(ranks):
        yield ranks


def _raised(ranks: Communicator) -> str:
    """Wait for the others until a collective fails; return its error."""
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            ranks.barrier()
            time.sleep(0.01)
    except RanksError as error:
        return str(error)
    return ""


def _cause(ranks: Communicator) -> str:
    """Return which ranks left so far, though no collective failed."""
    cause = ranks.cause()
    ranks.barrier()
    return cause


def _continue_after(seconds: float, *processes: int) -> None:
    """Stop processes at once, and continue them."""
    numbers = " ".join(map(str, processes))
    subprocess.Popen(["sh", "-c", f"kill -STOP {numbers}; sleep {seconds}; kill -CONT {numbers}"])


def lost(rank: int, *, which: int, how: int) -> str:
    """Rank `which` gets the signal `how`. Return each other rank's error."""
    with _ranks() as ranks:
        if rank == which:
            os.kill(os.getpid(), how)
        return _raised(ranks)


def holds_the_gil(rank: int) -> str:
    """Rank 1 calls C code that does not release it."""
    with _ranks() as ranks:
        if rank == 1:
            ctypes.PyDLL(None).usleep(int(1e6 * LONGER))
        ranks.barrier()
        time.sleep(TIMEOUT)
        return _cause(ranks)


def all_stopped(rank: int) -> str:
    """The whole job is stopped and continued, as by Ctrl-Z and fg, or with its virtual machine."""
    with _ranks() as ranks:
        processes = ranks.gather(os.getpid())
        if rank == 0:
            _continue_after(LONGER, *processes)
        time.sleep(LONGER + 2 * TIMEOUT)
        return _cause(ranks)


def stopped_and_continued(rank: int) -> str:
    """Rank 1 is stopped, and continues after the others have given up. Sockets of the user's own stay open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with before, accepted, _ranks() as ranks:
        if rank == 1:
            _continue_after(2 * LONGER, os.getpid())
        said = _raised(ranks)
        before.sendall(b"open")
        assert accepted.recv(4) == b"open"
        return said


def outlived_by_a_child(rank: int) -> str:
    """Rank 1 ends, and its forked child, such as a worker of a dataloader, keeps its connections."""
    with _ranks() as ranks:
        if rank == 1:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return _raised(ranks)


def closed_beside_a_child(rank: int) -> float:
    """A forked child keeps the descriptors. Return the seconds that closing takes."""
    ranks = Communicator(CpuDevice())
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    ranks.barrier()
    began = time.monotonic()
    ranks.close()
    seconds = time.monotonic() - began
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not [each for each in threading.enumerate() if each.name in ("infinity-beat", "infinity-ranks")]
    return seconds


def closed(rank: int) -> str:
    """Rank 1 closes its engine while the other waits."""
    with _ranks() as ranks:
        return "" if rank == 1 else _raised(ranks)


def connected(rank: int) -> list[int]:
    """Return the numbers of connections of each heartbeat, of several groups at once."""
    with _ranks() as one, _ranks() as two:
        dist.barrier()
        return [len(each._heartbeats._each[0]._watch._links) for each in (one, two)]
