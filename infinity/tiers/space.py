"""Reserves space for files, and gives it back to the file system as holes in them.

Checks that open files still have their names: a process may train into files that nothing can find again.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import OutOfSpaceError, StorageError

FULL = {errno.ENOSPC, errno.EDQUOT}
IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems whose files are in memory. Newer kernels accept `O_DIRECT` there, too."""


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of an open file."""

    fd: int
    folder: Path
    start: int
    stop: int


def names(folders: Sequence[Path]) -> str:
    return " and ".join(str(folder) for folder in folders)


def require(where: str | Path, nbytes: int, free: int) -> None:
    if free < nbytes:
        raise OutOfSpaceError(
            str(where),
            nbytes,
            free,
            f"free {human(nbytes - free)} there, or name a folder on a larger disk (nvme_path)",
        )


def human(nbytes: int) -> str:
    """Return bytes as text, rounded up, so that freeing the printed amount is enough."""
    unit, text = (1_000_000_000, "GB") if nbytes >= 1_000_000_000 else (1_000_000, "MB")
    return f"{-(-nbytes * 10 // unit) / 10:,.1f} {text}"


def reserve(part: Range) -> None:
    """Reserve the space of a range. Raises OutOfSpaceError, without a change, or StorageError."""
    folder, nbytes = part.folder, part.stop - part.start
    try:
        # Allocates blocks, unlike ftruncate: a write must not find the disk full later.
        os.posix_fallocate(part.fd, part.start, nbytes)
    except OSError as error:
        if error.errno in FULL:  # space taken since the check, a quota, or metadata of the file system
            punch(part)  # some of it may have been reserved
            status = os.statvfs(folder)
            require(folder, nbytes, min(status.f_bavail * status.f_frsize, nbytes - 1))
        raise StorageError(
            f"cannot reserve {nbytes:,} bytes in {folder}: {error.strerror}; its file system "
            f"({file_system_of(folder)}) or a limit (ulimit -f) does not allow a file of that size"
        ) from error


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Modes of Linux's fallocate(2), which Python does not give."""
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


def punch(part: Range) -> bool:
    """Release the space of a range. Returns False if the file system or the system cannot."""
    if _fallocate is None:
        return False
    # Without types, ctypes would pass 32 bits.
    offset, nbytes = ctypes.c_int64(part.start), ctypes.c_int64(part.stop - part.start)
    return bool(_fallocate(ctypes.c_int(part.fd), ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), offset, nbytes) == 0)


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of `folder`, such as "ext4"."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown file system"


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
