"""Processes of ranks: their names in messages, and how one ended or why it is silent, as far as this machine knows."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
