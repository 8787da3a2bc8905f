"""Evictable memory: tensors whose bytes are in an anonymous file and, while in use, in the page cache.

Such tensors are read and written like any other; the kernel pages bytes in on access. They serve foreign code that
works on values, such as the constructors of models. Tiers do not use them: their reads are asynchronous, and a failed
read raises at its wait. Here a failed read ends the process (SIGBUS), and a failed write is found by `check`. Forked
processes share the file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import weakref
from pathlib import Path

import torch

from infinity.errors import OutOfSpaceError, StorageError
from infinity.tiers.files import check_folder, open_anonymous, whole
from infinity.tiers.memory import PAGE
from infinity.tiers.space import FULL, file_system_of

_FIRST_SEGMENT = 1 << 30


class _Segment:
    """A part of the file in one mapping. Later segments are longer, so that a few hold the largest model.

    Reserves only addresses at first; disk space is reserved piece by piece.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes)
        self.mapping = mmap.mmap(fd, nbytes, offset=offset)
        self.offset, self.nbytes, self.used = offset, nbytes, 0
        self.address = torch.frombuffer(self.mapping, dtype=torch.uint8, count=1).data_ptr()


class MappedFile:
    """A growing anonymous file in `folder`, deleted with its last tensor or when the process ends.

    Raises StorageError if the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.folder = folder
        self._fd, named = open_anonymous(folder, "values of a model that is built")
        weakref.finalize(self, _close, self._fd, named, os.getpid())
        self._segments: list[_Segment] = []

    @property
    def free(self) -> int:
        """Bytes free on its file system."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def store(self, content: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the file, uint8 (n,), with the bytes of `content`, uint8 (n,).

        Its space is released with its last view.

        Raises:
            OutOfSpaceError: too little space; nothing was written.
            StorageError: the file system or a limit does not allow a mapped file of that size.
            OSError: the write failed.
        """
        nbytes = content.numel()
        segment = self._reserve(whole(nbytes, PAGE))
        start = segment.used
        _write(self._fd, content.numpy().data, segment.offset + start, self.folder)
        segment.used += whole(nbytes, PAGE)
        piece = memoryview(segment.mapping)[start : start + nbytes]
        # Only the storage of the tensor refers to the piece.
        weakref.finalize(piece, _give_back, segment.mapping, start, nbytes, os.getpid()).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8)

    def let_go(self, storage: torch.UntypedStorage) -> bool:
        """Drop the pages of a tensor of `store` from this process's memory; the file keeps its values.

        Returns False if the tensor is not in this file.
        """
        segment = self._segment_of(storage)
        if segment is None:
            return False
        segment.mapping.madvise(mmap.MADV_DONTNEED, storage.data_ptr() - segment.address, storage.nbytes())
        return True

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a tensor is in this file."""
        return self._segment_of(storage) is not None

    def _segment_of(self, storage: torch.UntypedStorage) -> _Segment | None:
        address = storage.data_ptr()
        return next((each for each in self._segments if 0 <= address - each.address < each.nbytes), None)

    def check(self) -> None:
        """Flush the file. Raises OSError if a write of it has ever failed, since a value may be lost."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{self.folder} (values of a model that was built)") from error

    def _reserve(self, nbytes: int) -> _Segment:
        """Return a segment with `nbytes` reserved after its used part."""
        segment = self._segments[-1] if self._segments else None
        try:
            if segment is None or segment.used + nbytes > segment.nbytes:
                end = segment.offset + segment.nbytes if segment is not None else 0
                segment = _Segment(self._fd, end, max(_FIRST_SEGMENT, end, nbytes))
                self._segments.append(segment)
            os.posix_fallocate(self._fd, segment.offset + segment.used, nbytes)
        except OSError as error:
            if error.errno in FULL:
                hint = "a model is kept there while it is built: free space, or name a folder on a larger disk"
                raise OutOfSpaceError(
                    str(self.folder), nbytes, min(self.free, nbytes - 1), f"{hint} (nvme_path)"
                ) from None
            raise StorageError(
                f"cannot map {nbytes:,} bytes of a file in {self.folder}: {error.strerror}; its file system "
                f"({file_system_of(self.folder)}) or a limit (ulimit -f, ulimit -v) does not allow it"
            ) from error
        return segment


def _write(fd: int, content: memoryview, offset: int, folder: Path) -> None:
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(fd, content[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{folder} (values of a model that is built)") from error


def _give_back(mapping: mmap.mmap, start: int, nbytes: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child, which shares the file
    with contextlib.suppress(OSError):  # a file system without holes: the space is released with the file
        mapping.madvise(mmap.MADV_REMOVE, start, nbytes)


def _close(fd: int, folder: Path | None, owner: int) -> None:
    os.close(fd)
    if folder is not None and os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
