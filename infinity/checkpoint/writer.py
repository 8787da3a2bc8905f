"""Writes folders that appear complete or not at all: files go to a hidden folder, which is renamed at the end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from infinity.checkpoint.format import INDEX, LATEST, Index
from infinity.checkpoint.piecewise import PiecewiseFile
from infinity.checkpoint.tensors import FileRecord, Spec, write_bytes, write_tensors
from infinity.errors import CheckpointError, OutOfSpaceError, UsageError
from infinity.inputs import replacing


def check_out(out: Path, nbytes: int) -> None:
    """Raise UsageError if `out` exists and is not an empty folder, OutOfSpaceError if its drive lacks `nbytes`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists and is not an empty folder: pass a new path")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(above).free
    if nbytes > free:
        raise OutOfSpaceError(str(above), nbytes, free, "free space, or write to another drive")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that is renamed to `out` after the block, or removed if the block fails."""
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


_FOLDER = 0o770
"""Permissions of a checkpoint's folder, less the umask: optimizer states are nobody else's to read."""


class Writer:
    """Writes directory/tag. `finish` publishes it; until then, `remove` deletes all of it."""

    def __init__(self, directory: Path, tag: str) -> None:
        directory = directory.absolute()  # since the script may change its working directory during a save
        self.whole = False
        self._files: dict[str, FileRecord] = {}
        self._piecewise: dict[str, PiecewiseFile] = {}
        self._created: list[Path] = []
        """Folders that `open` created above the checkpoint, innermost first."""
        self._target = directory / tag
        self._partial = directory / f".{tag}.partial-{os.getpid()}"
        self._replaced = directory / f".{tag}.replaced-{os.getpid()}"

    @property
    def folder(self) -> Path:
        """The hidden folder."""
        return self._partial

    def open(self) -> None:
        """Create the hidden folder, and remove leftovers of killed saves.

        Raises CheckpointError if the checkpoint would replace something else, such as a folder of data.
        """
        _check_replaced(self._target)
        _remove_stale(self._target.parent)
        self.remove()
        parent = self._partial.parent
        self._created = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from None
        self._partial.mkdir(mode=_FOLDER)

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        specs = {name: Spec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        self.write_parts(file, specs, lambda name: [tensors[name]])

    def write_parts(self, file: str, specs: Mapping[str, Spec], parts: Callable[[str], Iterable[torch.Tensor]]) -> None:
        """Write tensors that are not in memory at once; see `write_tensors`."""
        self._files[file] = write_tensors(self._partial / file, specs, parts)

    def piecewise(self, file: str, specs: Mapping[str, Spec]) -> PiecewiseFile:
        """Return the file of tensors that are written in pieces; the first call creates it."""
        if file not in self._piecewise:
            self._piecewise[file] = PiecewiseFile(self._partial / file, specs)
        return self._piecewise[file]

    def finish_whole(self) -> None:
        """Finish the files that are written in pieces and have all of them, so that few stay open."""
        for name in [name for name, file in self._piecewise.items() if file.is_whole]:
            self._files[name] = self._piecewise.pop(name).finish()

    def write_raw(self, file: str, content: bytes) -> None:
        self._files[file] = write_bytes(self._partial / file, content)

    def add(self, files: Mapping[str, FileRecord]) -> None:
        """Add files that another rank has written to the folder. Raises CheckpointError if they are not there."""
        for name, record in files.items():
            path = self._partial / name
            if not path.is_file() or path.stat().st_size != record.nbytes:
                raise CheckpointError(f"{path} is not what another rank wrote: save to a folder that all ranks share")
        self._files |= files

    def remove(self) -> None:
        """Delete an incomplete checkpoint, and the folders that `open` created for it."""
        for file in self._piecewise.values():
            file.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        with suppress(OSError):  # others have files there
            for folder in self._created:
                folder.rmdir()

    def finish(self, index: Index, *, latest: bool = True) -> None:
        """Add the files to the index, and rename the folder to its final name. latest: then update `latest`."""
        self._files |= {name: file.finish() for name, file in self._piecewise.items()}
        files = sorted(self._files.items())
        index = replace(
            index,
            file_bytes={name: file.nbytes for name, file in files},
            file_crc32={name: file.crc32 for name, file in files},
        )
        write_bytes(self._partial / INDEX, index.to_json().encode())
        self._put_in_place()
        if latest:
            with replacing(self._target.parent / LATEST) as file:
                file.write_text(self._target.name, encoding="utf-8")
                _sync(file)
            _sync(self._target.parent)
        self.whole = True

    def _put_in_place(self) -> None:
        """Rename the folder; if the tag exists, first rename the old one to a name that `find` also finds."""
        if os.path.lexists(self._target):
            os.rename(self._target, self._replaced)
        try:
            os.rename(self._partial, self._target)
        except BaseException:
            if self._replaced.exists():
                os.rename(self._replaced, self._target)
            raise
        _sync(self._target.parent)
        if self._replaced.is_symlink():
            self._replaced.unlink()
        shutil.rmtree(self._replaced, ignore_errors=True)


def _check_replaced(target: Path) -> None:
    """Raise CheckpointError if `target` has another content than a checkpoint, which a save would delete."""
    if target.is_symlink() or not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / INDEX).exists()):
        kind = "folder" if target.is_dir() else "file"
        raise CheckpointError(
            f"{target} is a {kind} that is no checkpoint, which the save would delete: pass another directory or tag, "
            "or remove it"
        )


def _remove_stale(directory: Path) -> None:
    """Remove leftovers of killed saves: partial folders, and replaced folders whose successor is complete."""
    for kind in ("partial", "replaced"):
        for folder in directory.glob(f".*.{kind}-*"):
            tag, _, pid = folder.name[1:].rpartition(f".{kind}-")
            whole = kind == "partial" or (directory / tag).exists()
            if whole and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
