"""Opens the files that tiers keep their states in.  The one place that creates them.

A swap file is anonymous (`O_TMPFILE`): it has no name that could collide, and it is gone when the process ends,
however that happens.  Where the file system cannot do that, it is a named file in a folder of its own, and both names
are removed at once. All its space is reserved before the first byte is used.

Reserved space is not laid out by writing zeros to it.  On ext4, writing reserved space for the first time took 1.8
times as long as overwriting it (3.7 against 6.7 GB/s), but reading it costs next to nothing, since the kernel knows
that it is zero: laying out would take as long as that first write, and make the first read cost what every other
does.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from types import TracebackType

from infinity import _aio
from infinity.errors import OutOfSpaceError, StorageError

__all__ = ["SwapFile", "open_swap_file"]

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class SwapFile:
    """An open file with `nbytes` bytes reserved; nothing of it is left when it is closed, or when the process ends.

    `file` is what `infinity._aio.Engine` reads and writes, `path` a name for messages (there is no such file),
    `nbytes` its size, rounded up to `alignment` bytes; `direct` is False where the file system refuses `O_DIRECT`.
    """

    def __init__(self, direct_fd: int, buffered_fd: int, path: str, nbytes: int, folder: Path | None = None) -> None:
        self.alignment = _alignment()
        self.file = _aio.File(direct_fd, buffered_fd, path, self.alignment)
        self.path = path
        self.nbytes = nbytes
        self._fds = [fd for fd in (direct_fd, buffered_fd) if fd >= 0]
        self._folder = folder

    @property
    def direct(self) -> bool:
        return self.file.direct

    def close(self) -> None:
        """Gives the space back.  Every request on the file has to be done before; closing twice does no harm."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        if self._folder is not None:  # network file systems keep removed files under another name while they are open
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SwapFile({self.path!r}, {self.nbytes:,} bytes, {'direct' if self.direct else 'buffered'})"


def open_swap_file(directory: str | Path, nbytes: int, *, name: str) -> SwapFile:
    """Creates an anonymous file of `nbytes` bytes in `directory`, all of them reserved.

    `name` is for messages, and for the moment the file has a name where it cannot be anonymous.  The bytes read as
    zeros until they are written.  Warns once per call when the file system refuses `O_DIRECT`; the file works all the
    same.

    Raises:
        StorageError: the folder does not exist, is none, or cannot be written.
        OutOfSpaceError: fewer than `nbytes` bytes are free there; nothing is left behind.
        ValueError: `nbytes` is not positive.
    """
    folder = Path(directory)
    if nbytes <= 0:
        raise ValueError(f"a swap file needs at least one byte; {nbytes} were asked for")
    _check_folder(folder)
    size = -(-nbytes // _alignment()) * _alignment()
    _check_space(folder, size)

    fd, named = _open_anonymous(folder, name)
    direct_fd = -1
    try:
        direct_fd = _open_direct(fd, folder)
        _reserve(fd, folder, size)
        return SwapFile(direct_fd, fd, str(folder / name), size, named)
    except BaseException:
        os.close(fd)
        if direct_fd >= 0:
            os.close(direct_fd)
        if named is not None:
            shutil.rmtree(named, ignore_errors=True)
        raise


def _alignment() -> int:
    """Bytes: what every disk accepts for direct I/O, and a whole page (csrc/aio/file.h says why)."""
    return max(4096, mmap.PAGESIZE)


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise StorageError(f"{folder} does not exist; create it, or name another folder (nvme_path)")
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder; name one (nvme_path)")


def _check_space(folder: Path, nbytes: int) -> None:
    status = os.statvfs(folder)
    if status.f_blocks > 0:  # some file systems do not know
        _require(folder, nbytes, status.f_bavail * status.f_frsize)


def _require(folder: Path, nbytes: int, free: int) -> None:
    if free < nbytes:
        raise OutOfSpaceError(
            str(folder),
            nbytes,
            free,
            f"free {_human(nbytes - free)} there, or name a folder on a larger disk (nvme_path)",
        )


def _human(nbytes: int) -> str:
    """Rounded up, so that freeing as much is enough."""
    unit, text = (1_000_000_000, "GB") if nbytes >= 1_000_000_000 else (1_000_000, "MB")
    return f"{-(-nbytes * 10 // unit) / 10:,.1f} {text}"


def _open_anonymous(folder: Path, name: str) -> tuple[int, Path | None]:
    """A descriptor of a new file without a name, and the folder to remove later where one was needed."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except OSError as error:
        if error.errno in _FULL:
            _require(folder, _alignment(), 0)
        if error.errno not in _NO_TMPFILE:
            raise _unwritable(folder, error) from error
    own: Path | None = None
    try:
        own = Path(tempfile.mkdtemp(prefix="infinity-", dir=folder))
        path = own / name.replace(os.sep, "_")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except OSError as error:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        raise _unwritable(folder, error) from error
    try:
        own.rmdir()
    except OSError:
        return fd, own
    return fd, None


def _unwritable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot create a file in {folder}: {error.strerror}; make the folder writable, or name another one (nvme_path)"
    )


def _open_direct(fd: int, folder: Path) -> int:
    """A second descriptor of the file, with `O_DIRECT`; -1, and a warning, where that does not work.

    Some file systems accept the flag and refuse the transfer, so a page is written and read back.
    """
    direct_fd = -1
    try:
        direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        _probe(direct_fd)
        return direct_fd
    except OSError as error:
        if direct_fd >= 0:
            os.close(direct_fd)
        if error.errno in _FULL:
            _require(folder, 2 * _alignment(), 0)
        warnings.warn(
            f"{folder} ({_file_system(folder)}) refuses direct I/O ({error.strerror}): its files go through the page "
            "cache, which costs speed and memory; a folder on a local ext4 or xfs disk does better",
            RuntimeWarning,
            stacklevel=3,
        )
        return -1
    finally:
        os.ftruncate(fd, 0)


def _probe(direct_fd: int) -> None:
    """Writes and reads the second block: offset 0 would suit every alignment."""
    size = _alignment()
    with mmap.mmap(-1, size) as written, mmap.mmap(-1, size) as read:
        written[:] = b"\xa5" * size
        if os.pwrite(direct_fd, written, size) != size or os.preadv(direct_fd, [read], size) != size:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if read[:] != written[:]:
            raise OSError(errno.EIO, "a page that was written read back different")


def _reserve(fd: int, folder: Path, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in _FULL:  # others took the space since it was checked, a quota, or the file system's own needs
            os.ftruncate(fd, 0)
            status = os.statvfs(folder)
            _require(folder, nbytes, min(status.f_bavail * status.f_frsize, nbytes - 1))
        raise StorageError(
            f"cannot reserve {nbytes:,} bytes in {folder}: {error.strerror}; its file system ({_file_system(folder)}) "
            "or a limit (ulimit -f) does not allow a file of that size"
        ) from error


def _file_system(folder: Path) -> str:
    """The type of the file system `folder` is on, such as "ext4"."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown file system"
