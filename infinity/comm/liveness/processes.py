"""Processes of ranks: their names in messages, and how one ended or why it is silent, as far as this machine knows.

Ends the process if its main thread waits for a lost rank in a call that nothing else ends.

The engine can end waits in its own groups, not in those of the script. See [Note: ranks that end or hang].
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from infinity.observe.log import logger

_SETTLING = 1.0
"""Seconds in which a process whose connections closed becomes a zombie, which has an exit status."""
_POLL = 0.01
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Indices in /proc/PID/stat after the command's name."""
_STOPPED = "Tt"
"""States of a process under SIGSTOP and under a debugger."""
_ENDED = "ZX"


@dataclass(frozen=True)
class Process:
    """The process of one rank."""

    rank: int
    """Its rank in the whole job."""
    host: str
    pid: int
    started: str
    """Time of its start, in the kernel's ticks: another process may get its number later."""
    kernel: str
    """Identifies the running kernel and the namespace that `pid` belongs to."""

    @classmethod
    def own(cls, rank: int) -> Process:
        return cls(rank, socket.gethostname(), os.getpid(), _stat(os.getpid())[_STARTED], _kernel())

    @property
    def name(self) -> str:
        """Text such as "rank 1 (host node7, pid 4711)"."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def why_silent(self) -> str:
        """Return why this process may not have answered."""
        # /proc shows processes of this kernel and namespace only; the number may be another process's here.
        if self.kernel != _kernel():
            return "it is stopped, swapping, or its machine is unreachable"
        state = self._fields()[_STATE]
        if state in _STOPPED:
            return "its process is stopped (SIGSTOP, or a debugger)"
        if state in _ENDED:
            return self.how_it_ended(oom_kills())
        return "its process exists but does not run, or the network to it has failed"

    def how_it_ended(self, oom_kills_before: int) -> str:
        """Return how this process ended, whose connection has closed. Takes up to a second.

        oom_kills_before: `oom_kills()` when all was well.
        """
        elsewhere = (
            "its process has ended: see its last messages, and dmesg of its machine for the out-of-memory killer"
        )
        if self.kernel != _kernel():
            return elsewhere
        deadline = time.monotonic() + _SETTLING
        # Connections close before the process becomes a zombie, whose fields have the exit status.
        while (fields := self._fields())[_STATE] not in _ENDED:
            if time.monotonic() >= deadline:
                return "it closed its connection, but its process has not ended"
            time.sleep(_POLL)
        if oom_kills() > oom_kills_before:
            return "its process has ended, and the kernel's out-of-memory killer was active on its machine: see dmesg"
        if len(fields) <= _EXIT_CODE:  # its parent has the exit status already
            return elsewhere
        code = int(fields[_EXIT_CODE])
        if number := code & 0x7F:
            often = ", often by the out-of-memory killer: see dmesg" if number == signal.SIGKILL else ""
            return f"it was killed by signal {number} ({_signal_name(number)}){often}"
        return f"it ended with exit status {code >> 8}: see its last messages"

    def _fields(self) -> list[str]:
        """Return its fields in /proc/PID/stat; one that says it has ended if the process does not exist."""
        fields = _stat(self.pid)
        return fields if len(fields) > _STARTED and fields[_STARTED] == self.started else [_ENDED[0]]


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended; 0 if this kernel does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _stat(pid: int) -> list[str]:
    try:
        # The command's name comes before the last bracket, and may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@cache
def _kernel() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


EXIT_STATUS = 75
"""Exit status of a process that is ended: EX_TEMPFAIL of sysexits.h."""
PATIENCE = 10.0
"""Seconds of one wait after which the process ends."""
_LIBRARY = os.path.dirname(dist.__file__) + os.sep
_OPERATORS = torch._ops.__file__
"""Its frames call the operators of torch, such as the collectives of DTensors."""


class StuckMain:
    """Watches the main thread."""

    def __init__(self, ending: Callable[[str], None]) -> None:
        """ending: called with the cause before the process ends."""
        self._ending = ending
        self._wait: tuple[int, int] | None = None
        self._since = 0.0

    def check(self, cause: str) -> None:
        """End the process if all calls of this function in `PATIENCE` seconds found the main thread in the same call of
        torch.distributed. cause: the error to print.
        """
        wait, now = _present_wait(), time.monotonic()
        if wait is None or wait != self._wait:
            self._wait, self._since = wait, now
        elif now - self._since >= PATIENCE:
            logger.error(
                "%s. The script waits for that rank in torch.distributed, so this process ends with exit status %d. "
                "Fix the error and restart all ranks.",
                cause,
                EXIT_STATUS,
            )
            self._ending(cause)
            # os._exit flushes nothing. It is needed, since an exception would end this thread alone.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(EXIT_STATUS)


def _present_wait() -> tuple[int, int] | None:
    """Return what identifies the main thread's call of torch.distributed; None if it is in no such call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == _OPERATORS:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_LIBRARY):
        return None
    # The same frame at the same instruction counts as the same call.
    return id(frame), frame.f_lasti
