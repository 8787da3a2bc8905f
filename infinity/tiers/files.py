"""Creates and opens the files that tiers store states in.

A swap file is anonymous (`O_TMPFILE`): its name cannot collide, and the system deletes it when the process ends, even
if it is killed. If the file system does not support this, it is a named file in a folder of its own, and both names are
removed at once. All its space is reserved before the first byte is used.

Reserved space is not zeroed. On ext4, the first write to reserved space took 1.8 times as long as overwriting it (3.7
against 6.7 GB/s), but reading it is nearly free, since it is marked as zero. Zeroing would take as long as that first
write and make the first read as slow as later ones.

Space that is rarely used is released in between, as holes of the file, if the file system can make them.

The files of a durable run have names and stay; only their owner may read them.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from infinity.errors import StorageError
from infinity.native import _aio
from infinity.observe.log import logger
from infinity.plan.io import LARGEST_CHUNK, Stripe
from infinity.tiers.space import FULL, IN_MEMORY, Range, check_named, file_system_of, names, punch, require, reserve

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}


@dataclass(frozen=True)
class Member:
    """One open file of a swap file. direct: descriptor with `O_DIRECT`; -1: none. path: names a file only if it is
    durable. nbytes: reserved. own: folder of the file alone, to be removed with it, if any.
    """

    fd: int
    direct: int
    folder: Path
    path: Path
    nbytes: int
    own: Path | None

    @property
    def fds(self) -> list[int]:
        return [self.direct, self.fd] if self.direct >= 0 else [self.fd]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        if self.own is not None:  # network file systems keep removed files under another name while they are open
            shutil.rmtree(self.own, ignore_errors=True)


class SwapFile:
    """An open file with `nbytes` bytes reserved, deleted when it is closed or the process ends unless it is durable.

    `file`: the file for `infinity.native._aio.Engine`, which may be striped over several. `path`: a name for messages
    (no such file exists if it is not durable). `nbytes`: the requested size, rounded up to the file's alignment or to
    whole chunks of the stripe.
    """

    def __init__(self, members: Sequence[Member], nbytes: int, stripe: Stripe) -> None:
        """members: closed with the file."""
        self.path = ", ".join(str(member.path) for member in members)
        self.nbytes = nbytes
        self._fds = [fd for member in members for fd in member.fds]
        self._members = members
        self.stripe = stripe
        self.file = self.native()

    def native(self) -> _aio.File:
        """Return the file for the I/O engine, with checksums of its own if it is to keep any."""
        files = [_aio.File(each.direct, each.fd, str(each.path), alignment()) for each in self._members]
        return files[0] if len(files) == 1 else _aio.File.striped(files, self.stripe.chunk, self.stripe.order)

    @property
    def direct(self) -> bool:
        """False if a file system refuses `O_DIRECT`."""
        return self.file.direct

    def release(self, offset: int, nbytes: int) -> bool:
        """Give bytes back to the file system: they read as zeros, and space for them has to be reserved before a write.

        Returns False, and keeps them, if a file system does not make holes in files.
        """
        released: list[Range] = []
        for part in self._ranges(offset, nbytes):
            if not punch(part):
                # All members or none, since an extent of a stripe is reserved and released as a whole.
                for other in released:
                    reserve(other)
                return False
            released.append(part)
        return True

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve released bytes again. Raises OutOfSpaceError, without a change, if too few are free."""
        reserved: list[Range] = []
        for part in self._ranges(offset, nbytes):
            try:
                reserve(part)
            except BaseException:
                # The error promises no change.
                for other in reserved:
                    punch(other)
                raise
            reserved.append(part)

    def _ranges(self, offset: int, nbytes: int) -> list[Range]:
        """Return the bytes in each file that has any."""
        parts = self.stripe.ranges(offset, nbytes)
        return [
            Range(member.fd, member.folder, start, stop)
            for member, (start, stop) in zip(self._members, parts, strict=True)
            if start < stop
        ]

    def sync(self) -> None:
        """Wait until the bytes written so far have reached the drives. Raises OSError with the folder."""
        for member in self._members:
            try:
                os.fdatasync(member.fd)
            except OSError as error:
                raise OSError(error.errno, os.strerror(error.errno or 0), str(member.folder)) from error

    def check_named(self) -> None:
        """Raise MisplacedError if a durable file was removed, renamed, replaced or cut short while it is open."""
        for member in self._members:
            check_named(member.fd, member.path, member.nbytes)

    def close(self) -> None:
        """Release the space. All requests on the file must be done before. Idempotent."""
        # A second call must not close a descriptor that another file has got since.
        if self._fds:
            self._fds = []
            for member in self._members:
                member.close()

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SwapFile({self.path!r}, {self.nbytes:,} bytes, {'direct' if self.direct else 'buffered'})"


def open_swap_files(
    paths: Sequence[str | Path],
    nbytes: int,
    *,
    name: str,
    chunk: int = LARGEST_CHUNK,
    weights: Sequence[int] = (),
    durable: bool = False,
    holds_states: bool = False,
) -> SwapFile:
    """Create one logical file of `nbytes` reserved bytes, striped over an anonymous file in each folder of `paths`.

    chunk: bytes of a stripe's chunk, a multiple of 64 KiB (see `infinity.plan.io`). weights: of the stripe, by default
    equal. name: for messages, and for files that cannot be anonymous. durable: open the file `member_of(name, …)` in
    each folder instead, with its bytes, or create it; it stays. holds_states: each of these has to be there with all
    its bytes. Bytes read as zeros until they are written. Warns for each folder whose file system refuses `O_DIRECT`,
    where I/O goes through the page cache, and once if folders are on one file system.

    Raises:
        StorageError: a folder does not exist, is no folder, or is not writable; or a file that `holds_states` is short.
        OutOfSpaceError: too few bytes are free; files created before are removed.
        ValueError: `nbytes` is not positive, or `paths` is empty.
    """
    folders = [Path(path) for path in paths]
    if nbytes <= 0:
        raise ValueError(f"a swap file needs at least one byte, not {nbytes}")
    if not folders:
        raise ValueError("a swap file needs at least one folder")
    for folder in folders:
        check_folder(folder)
    stripe = Stripe(chunk, tuple(weights) or (1,) * len(folders))
    sizes = [whole(nbytes, alignment())] if len(folders) == 1 else stripe.sizes(nbytes)
    files = [member_of(name, member) if durable else name for member in range(len(folders))]
    if holds_states:
        for folder, file, size in zip(folders, files, sizes, strict=True):
            _check_whole(folder / file, size)
    # Blocks that a durable file has already need no space again.
    held = [_held(folder / file) if durable else 0 for folder, file in zip(folders, files, strict=True)]
    together = _by_file_system(folders, [max(0, size - there) for size, there in zip(sizes, held, strict=True)])
    for where, needed in together:
        _check_space(where, needed)
    for where, _ in together:
        if len(where) > 1:
            warnings.warn(
                f"{names(where)} are on one file system: striping over them gains nothing",
                RuntimeWarning,
                stacklevel=2,
            )

    with ExitStack() as undo:
        members = []
        for folder, file, size in zip(folders, files, sizes, strict=True):
            members.append(_open_one(folder, size, file, durable=durable))
            undo.callback(members[-1].close)
        swap = SwapFile(members, sizes[0] if len(members) == 1 else whole(nbytes, chunk), stripe)
        undo.pop_all()
        return swap


def member_of(name: str, member: int) -> str:
    """Return the name of a durable file's part in folder number `member`, so that no part is taken for another."""
    return f"{name}-{member}" if member else name


def _open_one(folder: Path, nbytes: int, name: str, *, durable: bool) -> Member:
    """Open and reserve one file. nbytes: a multiple of the alignment."""
    fd, own = (_open_durable(folder / name), None) if durable else open_anonymous(folder, name)
    member = Member(fd, -1, folder, folder / name, nbytes, own)
    try:
        # A probe writes a page and truncates the file, which would destroy the states of a durable run.
        direct = open_direct(fd) if os.fstat(fd).st_size else _open_direct(fd, folder)
        member = replace(member, direct=direct)
        reserve(Range(fd, folder, 0, nbytes))
        return member
    except BaseException:
        member.close()
        raise


def whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def alignment() -> int:
    """Return the alignment in bytes that direct I/O needs on every disk, at least a page (see csrc/aio/file.h)."""
    return max(4096, mmap.PAGESIZE)


def check_folder(folder: Path, key: str = "nvme_path") -> None:
    """Raise StorageError unless `folder` is one. key: of the config, for the error's text."""
    try:
        folder.stat()
    except FileNotFoundError:
        raise StorageError(f"{folder} does not exist; create it, or name another folder ({key})") from None
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; name another folder ({key})") from error
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder; name one ({key})")


def warn_of_memory(folders: Sequence[Path]) -> None:
    """Log a warning for each folder whose files are in memory, once in a process."""
    for folder in folders:
        kind = file_system_of(folder)
        if kind in IN_MEMORY:
            _warn_of_memory(folder, kind)


@cache
def _warn_of_memory(folder: Path, kind: str) -> None:
    logger.warning(
        "%s is on %s, which is memory: files there take host memory and save none. Name a folder on a local drive "
        "(nvme_path), such as one on ext4 or xfs.",
        folder,
        kind,
    )


def _by_file_system(folders: Sequence[Path], sizes: Sequence[int]) -> list[tuple[list[Path], int]]:
    """Return (folders, total bytes needed) for each file system."""
    found: dict[int, tuple[list[Path], int]] = {}
    for folder, size in zip(folders, sizes, strict=True):
        device = os.stat(folder).st_dev
        before, needed = found.get(device, ([], 0))
        found[device] = ([*before, folder], needed + size)
    return list(found.values())


def _check_space(folders: Sequence[Path], nbytes: int) -> None:
    """Raise OutOfSpaceError if `nbytes` are not free. folders: on one file system."""
    status = os.statvfs(folders[0])
    if status.f_blocks > 0:  # 0: unknown to the file system
        require(names(folders), nbytes, status.f_bavail * status.f_frsize)


def open_anonymous(folder: Path, name: str) -> tuple[int, Path | None]:
    """Create a file without a name. Returns its descriptor, and the folder to remove later, if any."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except OSError as error:
        # A full file system is no reason for a named file, which would fail as well: `require` raises its error.
        if error.errno in FULL:
            require(folder, alignment(), 0)
        if error.errno not in _NO_TMPFILE:
            raise _unwritable(folder, error) from error
    own: Path | None = None
    try:
        # A folder of its own, so that a network file system's name for the removed file can be removed with it.
        own = Path(tempfile.mkdtemp(prefix="infinity-", dir=folder))
        path = own / name.replace(os.sep, "_")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except OSError as error:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        raise _unwritable(folder, error) from error
    # A network file system keeps the removed file in it, under another name, while it is open.
    try:
        own.rmdir()
    except OSError:
        return fd, own
    return fd, None


def _open_durable(path: Path) -> int:
    """Open or create a file of a durable run. Raises StorageError if it is a link, not a file, or another user's."""
    try:
        # O_NOFOLLOW: somebody may have put a link in its place, to a file that this process may write.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise StorageError(f"{path} is not a file of this user: remove it, or name another run (infinity.run)")
    # The mode of `open` counts for new files only.
    os.fchmod(fd, 0o600)
    return fd


def _check_whole(path: Path, nbytes: int) -> None:
    """Raise StorageError if the file of a durable run lacks bytes, which would be read as zeros."""
    try:
        there = os.lstat(path).st_size
    except FileNotFoundError:
        raise StorageError(
            f"{path} is missing. If it was lost, restore it from a copy, or name another run (infinity.run) and load a "
            "checkpoint. Otherwise name the folders in nvme_path that the run was begun with, in the same order."
        ) from None
    if there < nbytes:
        raise StorageError(
            f"{path} is cut short: it has {there:,} bytes of {nbytes:,}. Put the whole file in its place, or name "
            "another run (infinity.run) and load a checkpoint"
        )


def _held(path: Path) -> int:
    """Return the bytes on the drive of a file that may not exist."""
    try:
        # Blocks and not the size: a file may have holes. stat counts in 512 bytes on each file system.
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def open_direct(fd: int, flags: int = os.O_RDWR) -> int:
    """Return a descriptor with `O_DIRECT` of a file with content; -1 if the file system refuses it."""
    try:
        # An anonymous file has no other path by which it could be opened again.
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def _unwritable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot create a file in {folder}: {error.strerror}; make the folder writable, or name another one (nvme_path)"
    )


def _open_direct(fd: int, folder: Path) -> int:
    """Return a second descriptor of the file, with `O_DIRECT`; warn and return -1 if the file system refuses it.

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
        if error.errno in FULL:
            require(folder, 2 * alignment(), 0)
        warnings.warn(
            f"{folder} ({file_system_of(folder)}) refuses direct I/O ({error.strerror}): its files go through the page "
            "cache, which costs speed and memory. Use a folder on a local ext4 or xfs disk",
            RuntimeWarning,
            stacklevel=4,  # the caller of open_swap_files
        )
        return -1
    finally:
        # Without the probe's page the file reads as zeros everywhere.
        os.ftruncate(fd, 0)


def _probe(direct_fd: int) -> None:
    """Write and read the second block, since offset 0 suits every alignment. Raises OSError if it fails."""
    size = alignment()
    with mmap.mmap(-1, size) as written, mmap.mmap(-1, size) as read:
        written[:] = b"\xa5" * size
        if os.pwrite(direct_fd, written, size) != size or os.preadv(direct_fd, [read], size) != size:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if read[:] != written[:]:
            raise OSError(errno.EIO, "a page that was written read back different")
