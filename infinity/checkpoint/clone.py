"""Copies ranges of files inside the kernel. XFS and btrfs share the bytes of aligned ranges instead of copying them."""

from __future__ import annotations

import errno
import os

_PIECE = 256 << 20
"""Bytes of one system call, during which Ctrl-C has no effect."""
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""Errors of copy_file_range between two file systems, and on file systems and kernels that lack it."""


def clone_range(source: int, start: int, target: int, place: int, nbytes: int) -> None:
    """Copy bytes [start, start + nbytes) of a file to byte `place` of another. source, target: descriptors.

    Raises OSError, with errno EIO if the source is too short.
    """
    copy = _copy_file_range
    while nbytes:
        try:
            count = copy(source, start, target, place, min(nbytes, _PIECE))
        except OSError as error:
            if copy is _sendfile or error.errno not in _UNSUPPORTED:
                raise
            count = 0
        if not count:
            if copy is _sendfile:
                raise OSError(errno.EIO, f"the file ends before byte {start + nbytes:,}: it was cut short")
            copy = _sendfile
            continue
        start, place, nbytes = start + count, place + count, nbytes - count


def drop_cached(file: int, start: int = 0, nbytes: int = 0) -> None:
    """Drop written-back pages of [start, start + nbytes) from the page cache. nbytes: 0 means to the end."""
    os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


def _copy_file_range(source: int, start: int, target: int, place: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes, start, place)


def _sendfile(source: int, start: int, target: int, place: int, nbytes: int) -> int:
    os.lseek(target, place, os.SEEK_SET)
    return os.sendfile(target, source, start, nbytes)
