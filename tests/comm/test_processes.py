"""The names of ranks' processes, and how one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from infinity.comm.liveness import processes
from infinity.comm.liveness.processes import Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input and exits with 3. Its exit status is not read before the end."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def of(child: subprocess.Popen[bytes]) -> Process:
    return replace(Process.own(1), pid=child.pid, started=processes._stat(child.pid)[processes._STARTED])


def test_exit_status(child: subprocess.Popen[bytes]) -> None:
    process = of(child)
    assert child.stdin is not None
    child.stdin.close()
    assert process.how_it_ended(processes.oom_kills()) == "it ended with exit status 3: see its last messages"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "it was killed by signal 9 (SIGKILL), often by the out-of-memory killer: see dmesg"),
        (signal.SIGTERM, "it was killed by signal 15 (SIGTERM)"),
        (signal.SIGRTMIN + 1, f"it was killed by signal {signal.SIGRTMIN + 1} (a real-time signal)"),
    ],
)
def test_signal(child: subprocess.Popen[bytes], number: int, text: str) -> None:
    process = of(child)
    child.send_signal(number)
    assert process.how_it_ended(processes.oom_kills()) == text


def test_out_of_memory_killer(child: subprocess.Popen[bytes]) -> None:
    """The kernel's count has grown."""
    process = of(child)
    child.kill()
    assert "the kernel's out-of-memory killer was active" in process.how_it_ended(processes.oom_kills() - 1)


def test_stopped_process(child: subprocess.Popen[bytes]) -> None:
    process = of(child)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.why_silent() == "its process is stopped (SIGSTOP, or a debugger)"
    child.send_signal(signal.SIGCONT)


def test_process_that_runs() -> None:
    process = Process.own(1)
    assert process.name == f"rank 1 (host {process.host}, pid {os.getpid()})"
    assert process.why_silent() == "its process exists but does not run, or the network to it has failed"
    assert process.how_it_ended(processes.oom_kills()) == "it closed its connection, but its process has not ended"


def test_number_of_a_process_that_was_reused(child: subprocess.Popen[bytes]) -> None:
    process = replace(of(child), started="1")
    assert process.how_it_ended(processes.oom_kills()).startswith("its process has ended: see its last messages")


def test_another_machine() -> None:
    process = replace(Process.own(1), kernel="another")
    assert process.why_silent() == "it is stopped, swapping, or its machine is unreachable"
    assert process.how_it_ended(processes.oom_kills()).startswith("its process has ended: see its last messages")
