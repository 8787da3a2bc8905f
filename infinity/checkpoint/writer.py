"""The folder of a checkpoint while it is written: files appear in a hidden one, which then takes its name at once."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from infinity.checkpoint.format import INDEX, LATEST, Index
from infinity.checkpoint.tensors import FileRecord, Spec, write_bytes, write_tensors


class Writer:
    """Writes directory/tag. `finish` makes it appear; before that, `remove` leaves nothing of it."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.whole = False
        self._files: dict[str, FileRecord] = {}
        self._target = directory / tag
        self._partial = directory / f".{tag}.partial-{os.getpid()}"
        self._replaced = directory / f".{tag}.replaced-{os.getpid()}"

    def open(self) -> None:
        """Make the hidden folder; take away what saves left that were killed."""
        _remove_stale(self._target.parent)
        self.remove()
        self._partial.mkdir(parents=True)

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        specs = {name: Spec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        self._files[file] = write_tensors(self._partial / file, specs, lambda name: [tensors[name]])

    def write_raw(self, file: str, content: bytes) -> None:
        self._files[file] = write_bytes(self._partial / file, content)

    def remove(self) -> None:
        """Leave nothing of a checkpoint that is not whole."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def finish(self, index: Index) -> None:
        """Add the files to the index, put the whole checkpoint in its place, then let `latest` name it."""
        files = sorted(self._files.items())
        index = replace(
            index,
            file_bytes={name: file.nbytes for name, file in files},
            file_crc32={name: file.crc32 for name, file in files},
        )
        write_bytes(self._partial / INDEX, index.to_json().encode())
        self._put_in_place()
        latest = self._target.parent / f".{LATEST}-{os.getpid()}"
        latest.write_text(self._target.name, encoding="utf-8")
        _sync(latest)
        os.replace(latest, self._target.parent / LATEST)
        _sync(self._target.parent)
        self.whole = True

    def _put_in_place(self) -> None:
        """Two renames where the tag was saved before; `find` knows the former one by its name in between."""
        if self._target.exists():
            os.rename(self._target, self._replaced)
        try:
            os.rename(self._partial, self._target)
        except BaseException:
            if self._replaced.exists():
                os.rename(self._replaced, self._target)
            raise
        _sync(self._target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)


def _remove_stale(directory: Path) -> None:
    """Take away what saves left that were killed: partial folders, and replaced ones whose successor is in place."""
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
