"""Checks that open files still have their names: a process may train into files that nothing can find again."""

from __future__ import annotations

import os
from pathlib import Path

from infinity.errors import StorageError

_DELETED = " (deleted)"
"""Suffix of a removed file's path in /proc/self/fd."""


class MisplacedError(StorageError):
    """An open file is not the one that its path names."""


def check_named(fd: int, path: Path, nbytes: int = 0) -> None:
    """Raise MisplacedError if `path` does not name the open file `fd`, or if the file has less than `nbytes` bytes."""
    status = os.fstat(fd)
    try:
        # lstat: a link in its place is another file, even if it leads here.
        is_there = os.path.samestat(status, os.lstat(path))
    except OSError:
        is_there = False
    if not is_there:
        instead = ", and another file has its name" if os.path.lexists(path) else ""
        raise MisplacedError(f"{path} was {_fate(fd, status)} while the run trained{instead}")
    if status.st_size < nbytes:
        raise MisplacedError(f"{path} was cut to {status.st_size:,} bytes of {nbytes:,} while the run trained")


def _fate(fd: int, status: os.stat_result) -> str:
    present = os.readlink(f"/proc/self/fd/{fd}")
    if not status.st_nlink or present.endswith(_DELETED):
        return "removed"
    return f"moved to {present}"
