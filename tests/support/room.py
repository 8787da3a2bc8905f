"""Where tests keep their files: in memory, since a shared disk makes them wait for seconds."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

MEMORY = Path("/dev/shm")
ON_DISK = "INFINITY_TESTS_ON_DISK"
"""Variable that keeps files on disk, in workers and ranks too."""


def in_memory() -> Path | None:
    """Return the folder in memory, if it has room and takes direct I/O."""
    return None if ON_DISK in os.environ or not _takes_direct_io(MEMORY) or not _has_room(MEMORY) else MEMORY


@lru_cache
def _takes_direct_io(folder: Path) -> bool:
    """Return whether files in `folder` can be opened with O_DIRECT, which tmpfs allows since Linux 6.6."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _has_room(folder: Path) -> bool:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize > 4 << 30
