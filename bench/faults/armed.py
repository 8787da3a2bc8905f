"""Injects one fault into the training process, and counts the operations at which faults can be injected."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.cases import Fault
from infinity.native import _aio

Counts = dict[str, float]
"""Counts of an undisturbed training: blocks, reads, writes, calls, syncs; and its seconds."""
STEPS = 6
CALLS = ("open", "mkdir", "posix_fallocate", "pwrite", "ftruncate", "fsync", "fdatasync", "unlink", "rename", "replace")
"""Functions of `os` by which Infinity opens or changes files."""
SYNCS = ("fsync", "fdatasync")
COUNTED: list[dict[str, object]] = [
    {"where": "block", "times": 0},
    {"where": "event", "only": "read", "times": 0},
    {"where": "event", "only": "write", "times": 0},
]
DAY = 86400.0


class Armed:
    """A fault to inject. None: injects nothing, and counts operations instead."""

    def __init__(self, fault: Fault | None, counts: Counts, folder: str) -> None:
        """folder: that of the training's files."""
        self._fault = fault
        self._counts = counts
        self._folder = folder
        self._calls = dict.fromkeys(CALLS, 0)
        if fault is None:
            _aio._inject(COUNTED)
            self._watch(lambda _: None)
            return
        _aio._inject(requests(fault, counts))
        if fault.kind == "kill at a system call":
            self._watch(self._kill, at=int(fault.at * counts["calls"]), after=fault.value < 0.5)
        elif fault.kind == "failed sync":
            self._watch(self._fail, SYNCS, at=int(fault.at * counts["syncs"]))

    def at_step(self, step: int) -> None:
        """Inject a fault that belongs between two steps."""
        if self._fault is None:
            return
        # In the first step torch compiles kernels, and crashes without memory for one.
        first = 1 if self._fault.kind == "memory limit" else 0
        if step != first + int(self._fault.at * (STEPS - first)):
            return
        if self._fault.kind == "memory limit":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = size + int(self._fault.value**3 * (8 << 20))
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        elif self._fault.kind == "clock jump":
            read, jump = time.time, DAY if self._fault.value < 0.5 else -DAY
            time.time = lambda: read() + jump
        elif self._fault.kind == "cut file":
            cut(states_files(self._folder), self._fault.value)

    def disarm(self) -> None:
        """Remove the memory limit, so that the error can be reported."""
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)

    def counted(self) -> Counts:
        blocks, reads, writes = _aio._matches() if self._fault is None else (0, 0, 0)
        syncs = sum(self._calls[name] for name in SYNCS)
        return {"blocks": blocks, "reads": reads, "writes": writes, "calls": sum(self._calls.values()), "syncs": syncs}

    def _watch(
        self, act: Callable[[str], None], names: tuple[str, ...] = CALLS, *, at: int = -1, after: bool = False
    ) -> None:
        """Count calls of functions of `os`. Calls `act` before or after call number `at` of the functions `names`."""

        def watched(name: str) -> Callable[..., Any]:
            function = getattr(os, name)

            def call(*given: Any, **more: Any) -> Any:
                self._calls[name] += 1
                now = name in names and sum(self._calls[each] for each in names) == at + 1
                if now and not after:
                    act(name)
                result = function(*given, **more)
                if now and after:
                    act(name)
                return result

            return call

        for name in CALLS:
            setattr(os, name, watched(name))

    def _kill(self, name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _fail(self, name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def requests(fault: Fault, counts: Counts) -> list[dict[str, object]]:
    """Return the I/O engine's faults, as of csrc/aio/faulty_queue.h."""
    block = {"where": "block", "after": int(fault.at * counts["blocks"])}
    end = {"where": "event", "after": int(fault.at * counts["blocks"])}
    read = {"where": "event", "only": "read", "after": int(fault.at * counts["reads"])}
    write = {"where": "event", "only": "write", "after": int(fault.at * counts["writes"])}
    often = 1 if fault.value < 0.5 else -1
    table: dict[str, dict[str, object]] = {
        "kill at a request": {**(block if fault.value < 0.5 else end), "signal": signal.SIGKILL},
        "stopped for a moment": {**block, "signal": signal.SIGSTOP},
        "hang": {**block, "signal": signal.SIGSTOP},
        "no space": {**write, "error": errno.ENOSPC, "times": often},
        "I/O error": {**(read if int(fault.value * 4) % 2 else write), "error": errno.EIO, "times": often},
        "short transfer": {**block, "bytes": 1 + int(fault.value * 8000), "times": 1 + int(fault.value * 1000) % 20},
        "refused submission": {
            "where": "submit",
            "after": int(fault.at * counts["blocks"] / 2),
            "error": (errno.EAGAIN, errno.EINTR)[often > 0],
            "times": 3,
        },
        "bit flip on the way": {**read, "flip": True},
        "slow drive": {**end, "milliseconds": 1 + int(fault.value * 10), "times": 30},
    }
    return [table[fault.kind]] if fault.kind in table else []


def states_files(folder: str) -> list[str]:
    """Return paths to the files of states: those of a durable run, and anonymous ones that this process has open."""
    device = os.stat(folder).st_dev
    found = [str(path) for path in Path(folder).rglob("*.states*")]
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        try:
            status = os.stat(path)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if status.st_dev == device and status.st_nlink == 0 and status.st_size and os.readlink(path).startswith(folder):
            found.append(path)
    return found


def cut(paths: list[str], value: float) -> None:
    """Truncate each file to the fraction `value` of its size."""
    for path in paths:
        os.truncate(path, int(os.stat(path).st_size * value))


def flip(paths: list[str], at: float, value: float) -> None:
    """Flip one bit of each file. at: place, from 0 to 1. value: bit of the byte, from 0 to 1."""
    for path in paths:
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            place = min(int(size * at), size - 1)
            byte = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << int(value * 8))]), place)
