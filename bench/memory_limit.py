"""A limit on this process's memory that needs no rights: RLIMIT_DATA, which Linux checks at each mapping.

RLIMIT_AS is no such limit: torch reserves address space that it never uses. Linux counts private writable memory for
RLIMIT_DATA since 4.7: the heap, anonymous mappings, thread stacks. Files that are mapped to be read, such as the code
of libraries, do not count (getrlimit(2)).
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

MAX_CORES = 4
"""Cores that a limited process uses. Each thread's stack counts in full, 8 MiB, and pools have a thread a core."""


def private_bytes() -> int:
    """Return the bytes of this process that count for the limit, VmData of proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/self/status has no VmData. The limit needs Linux 4.7 or later.")


def limit_memory(nbytes: int) -> None:
    """Let allocations of this process and its children fail beyond `nbytes` of private memory.

    resource.RLIM_INFINITY changes nothing.
    """
    if nbytes == resource.RLIM_INFINITY:
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:MAX_CORES])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
