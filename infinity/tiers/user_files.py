"""Opens files of the user for the I/O engine: by path, or by a descriptor that the user opened."""

from __future__ import annotations

import fcntl
import os
import stat
from types import TracebackType

from infinity.errors import StorageError, UsageError
from infinity.native import _aio
from infinity.tiers.files import alignment

_MODE = 0o600
"""Permissions of new files, as DeepSpeed gives them."""


class UserFile:
    """An open file for `infinity.native._aio.Engine`. `key` is equal for all openings of the same file.

    Reads and writes go to the disk directly, or through the page cache if the file system refuses `O_DIRECT`.
    """

    def __init__(self, where: str | os.PathLike[str] | int, *, write: bool) -> None:
        """where: a path, or a descriptor opened for writing, which the caller keeps open. write: open it for writing,
        and create the file if it does not exist; its other bytes stay.

        Raises OSError with the path, StorageError if it is neither a file nor a disk, and UsageError for a descriptor
        that cannot be used.
        """
        flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_CLOEXEC
        self._fds: list[int] = []
        try:
            if isinstance(where, int):
                self.path = _path_of(where)
                self._fds.append(_again(where, flags))
            else:
                self.path = os.fspath(where)
                self._fds.append(os.open(where, flags | (os.O_CREAT if write else 0), _MODE))
            status = os.fstat(self._fds[0])
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISBLK(status.st_mode):
                raise StorageError(f"{self.path} is neither a file nor a disk: name a file")
            # Not the path, by which one file has many names.
            self.key = status.st_dev, status.st_ino
            direct = self._open_direct(flags)
            self.file = _aio.File(direct, self._fds[0], self.path, alignment())
        except BaseException:
            self.close()
            raise

    def _open_direct(self, flags: int) -> int:
        """Return a second descriptor with `O_DIRECT`; -1 if the file system refuses it."""
        try:
            self._fds.append(os.open(f"/proc/self/fd/{self._fds[0]}", flags | os.O_DIRECT))
        except OSError:
            return -1
        return self._fds[-1]

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raise StorageError unless the file has bytes [offset, offset + nbytes)."""
        size = os.lseek(self._fds[0], 0, os.SEEK_END)
        if offset + nbytes > size:
            raise StorageError(
                f"{self.path} has {size:,} bytes, and a read of {nbytes:,} bytes at offset {offset:,} ends after them: "
                "pass a smaller tensor or offset"
            )

    def close(self) -> None:
        """Close the descriptors that were opened here. All requests must be done before. Idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> UserFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _path_of(fd: int) -> str:
    """Return the path of a descriptor, for messages. Raises UsageError if it does not write at given offsets."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise UsageError(f"fd {fd} is open for reading only: open it with os.O_WRONLY or os.O_RDWR")
    if flags & os.O_APPEND:
        raise UsageError(f"fd {fd} has O_APPEND, with which the system ignores offsets: open it without")
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"fd {fd}"


def _again(fd: int, flags: int) -> int:
    """Return another descriptor of the file, without `O_DIRECT` if possible."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError:  # the file lost its permissions after it was opened
        return os.dup(fd)
