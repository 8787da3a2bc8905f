"""Opens the I/O engine of nvme tiers: io_uring, or Linux AIO if the kernel forbids io_uring.

Opens files of the user for the I/O engine: by path, or by a descriptor that the user opened.

Measures the speeds of folders, by which files are striped over them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median

import torch

from infinity.errors import OutOfSpaceError, StorageError, UsageError
from infinity.native import _aio
from infinity.observe.log import logger
from infinity.plan.io import IoPlan, are_alike, weights_of
from infinity.tiers.files import alignment, open_direct, open_swap_files
from infinity.tiers.memory import before_unmapping, host_tensor

ENGINES = ("auto", "libaio", "io_uring")
"""Values of `aio.engine`."""

AUTO = ("io_uring", "libaio")
"""Engines that "auto" tries, the better one first."""


def open_engine(engine: str = "auto", *, block_size: int, queue_depth: int, threads: int) -> _aio.Engine:
    """Open an engine with `threads` I/O threads, each with up to `queue_depth` pieces of `block_size` bytes in flight.

    engine: one of `ENGINES`. "libaio" is Linux AIO, through the library or, without it, by system calls.

    Raises StorageError, with the reason and a fix, if the kernel refuses it.
    """
    refused = []
    for kind in AUTO if engine == "auto" else (engine,):
        try:
            return _open(kind, block_size, queue_depth, threads)
        except StorageError as error:
            logger.debug("no I/O engine of the kind %s: %s", kind, error)
            refused.append(f"{kind}: {error}")
    raise StorageError(refused[0] if len(refused) == 1 else "no I/O engine; " + "; ".join(refused))


def engine_of(io: IoPlan) -> _aio.Engine:
    """Open the I/O engine of a plan."""
    return open_engine(io.engine, block_size=io.block_size, queue_depth=io.queue_depth, threads=io.threads)


_MEASURED = 16 << 20
"""Bytes of each folder that a measurement writes and reads, repeatedly."""
_IN_FLIGHT = 4 << 20
_SECONDS = 0.2
"""Time to write, and to read. The kernel's throttle of a device lets a tenth of a second's bytes pass at once."""
_REPEATS = 5
"""Measurements before speeds count as different: on a busy machine, a drive sometimes pauses for half a second."""


def striped_by_speed(io: IoPlan, ranks: int, *, writes: bool = True) -> IoPlan:
    """Return a plan whose folders have shares by their speeds, which are measured, and by their room.

    ranks: of this node, which share the room. writes: False if the file is only read. Unchanged if all folders are on
    one file system, or if the file is smaller than the one to measure.
    """
    if not all(folder.is_dir() for folder in io.folders) or 0 < io.nbytes < _MEASURED * len(io.folders):
        return io
    devices = [os.stat(folder).st_dev for folder in io.folders]
    if len({*devices}) == 1:
        return io
    try:
        speeds = _speeds(io, writes=writes)
    except OutOfSpaceError:  # the file itself has a better error
        return io
    limits = [1.0] * len(devices)
    if io.nbytes:
        rooms = [status.f_bavail * status.f_frsize for status in map(os.statvfs, io.folders)]
        pairs = zip(rooms, devices, strict=True)
        limits = [(room / ranks / devices.count(device) - 2 * io.stripe.chunk) / io.nbytes for room, device in pairs]
    return replace(io, stripe=replace(io.stripe, weights=weights_of(speeds, limits)))


def _speeds(io: IoPlan, *, writes: bool) -> list[float]:
    """Return the relative speeds of the folders while all are used: of reads, or the harmonic mean of both directions.

    They are alike if one measurement finds them so, else the medians of `_REPEATS`.
    """
    folders, chunk = len(io.folders), io.stripe.chunk
    rows = _MEASURED // chunk
    slots = min(_IN_FLIGHT // chunk, io.queue_depth, rows)
    memory = host_tensor(folders * slots * chunk)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the states' file repeats them
        file = open_swap_files(io.folders, rows * folders * chunk, name="measurement", chunk=chunk)
    with file, engine_of(io) as engine, ThreadPoolExecutor(folders) as threads:

        def move(start: Callable[..., _aio.Request], folder: int, rows: int) -> tuple[float, int]:
            """Return the seconds of a chunk, and the number of chunks. rows: chunks of the folder that are used."""
            pending: deque[_aio.Request] = deque()
            begin = time.perf_counter()
            for done in count():
                if done and time.perf_counter() - begin >= _SECONDS:
                    break
                if len(pending) == min(slots, rows):
                    pending.popleft().wait()
                place, slot = (done % rows * folders + folder) * chunk, folder * slots + done % slots
                pending.append(start(file.file, place, memory.data_ptr() + slot * chunk, chunk))
            for request in pending:
                request.wait()
            return (time.perf_counter() - begin) / done, done

        found = []
        for _ in range(_REPEATS):
            written = list(threads.map(partial(move, engine.write), range(folders), [rows] * folders))
            # Space that was not written is read as zeros, without I/O.
            filled = [min(rows, number) for _, number in written]
            read = list(threads.map(partial(move, engine.read), range(folders), filled))
            speeds = [1 / ((w if writes else r) + r) for (w, _), (r, _) in zip(written, read, strict=True)]
            found.append([speed / sum(speeds) for speed in speeds])
            if are_alike(speeds):
                return speeds
    return [median(each) for each in zip(*found, strict=True)]


def register(engine: _aio.Engine, memory: torch.Tensor) -> None:
    """Register memory from `host_tensor` that many requests will use, until it is unmapped."""
    address = memory.data_ptr()
    # Unregistered before the memory is unmapped: otherwise the kernel would continue to use its pages.
    if engine.register(address, memory.numel()):
        before_unmapping(memory, partial(_unregister, weakref.ref(engine), address))


def _unregister(engine: weakref.ref[_aio.Engine], address: int) -> None:
    # The engine may have ended first, and its registrations with it.
    if (alive := engine()) is not None:
        alive.unregister(address)


def io_uring_state() -> str:
    """Return the reason why io_uring cannot be used; empty if it can."""
    try:
        _open("io_uring", 4096, 1, 1).close()
    except StorageError as error:
        return str(error)
    return ""


def _open(kind: str, block_size: int, queue_depth: int, threads: int) -> _aio.Engine:
    backend = next((name for name in _aio.backends() if (name == "io_uring") == (kind == "io_uring")), None)
    if backend is None:
        raise StorageError(f'this build has no {kind}; write another "engine" in the section aio, or "auto"')
    try:
        engine = _aio.Engine(block_size, queue_depth, threads, backend=backend)
    except OSError as error:  # its text names the limit or setting
        raise StorageError(error.strerror or str(error)) from error
    except ValueError as error:  # more threads, over all paths, than an engine supports
        raise StorageError(f"{error} (section aio; threads are intra_op_parallelism × the number of paths)") from error
    # The engine halves its depth until the kernel has enough slots: slower, but no reason to end a training.
    if engine.queue_depth < queue_depth:
        logger.warning(
            "aio.queue_depth is %d instead of %d: the system's slots for asynchronous I/O are short (raise "
            "fs.aio-max-nr with sysctl)",
            engine.queue_depth,
            queue_depth,
        )
    return engine


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
            direct = open_direct(self._fds[0], flags)
            if direct >= 0:
                self._fds.append(direct)
            self.file = _aio.File(direct, self._fds[0], self.path, alignment())
        except BaseException:
            self.close()
            raise

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

    def __exit__(self, *error: object) -> None:
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
