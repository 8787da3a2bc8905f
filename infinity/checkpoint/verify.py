"""Compares the files of a checkpoint with its index before they are used."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from infinity.checkpoint.committed import open_shards
from infinity.checkpoint.format import Index, file_in, key, shape_of
from infinity.checkpoint.tensors import Spec, read_crc32, spec_of
from infinity.comm.communicator import Communicator
from infinity.errors import CheckpointError
from infinity.inputs import open_input

_FIX = "Use another checkpoint, or pass verify=False to load it at your own risk."


def check_files(index: Index, folder: Path) -> None:
    """Raise CheckpointError if a file is missing, lies elsewhere, has another size, or lacks tensors of the index."""
    for file, nbytes in index.file_bytes.items():
        path = file_in(folder, file)
        try:
            with open_input(path) as opened:
                size = os.fstat(opened.fileno()).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the checkpoint is damaged, use another one") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): use another checkpoint") from None
        if size != nbytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes instead of {nbytes:,}: the checkpoint is damaged, use another one"
            )
    if index.shards:
        open_shards(index, folder)
        return
    by_file: dict[str, list[str]] = {}
    for name, entry in index.parameters.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for name in names:
                    for kind in index.kinds(name):
                        stored = spec_of(tensors, key(kind.name, name))
                        expected = Spec(kind.dtype, shape_of(kind, index.parameters[name].shape))
                        if stored != expected:
                            raise CheckpointError(
                                f"{folder / file}: {kind.name} of {name} is {stored.dtype} {list(stored.shape)}, but "
                                f"{expected.dtype} {list(expected.shape)} in the index: the checkpoint is damaged, use "
                                "another one"
                            )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / file} cannot be read ({error}): the checkpoint is damaged, use another one"
            ) from None


def check_contents(index: Index, folder: Path, ranks: Communicator | None = None, *, fix: str = _FIX) -> None:
    """Raise CheckpointError, which ends with `fix`, if a file's content differs from its checksum.

    ranks: share the work; the call is collective then, and all ranks raise. Checkpoints before version 3 have no
    checksums.
    """
    rank, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    problem = next(
        (text for file in sorted(index.file_crc32)[rank::size] if (text := _problem(index, folder, file))), ""
    )
    if ranks is not None and ranks.sum(float(bool(problem))):
        problem = problem or f"files of {folder} are damaged: see the error of another rank"
    if problem:
        raise CheckpointError(f"{problem}. {fix}")


def _problem(index: Index, folder: Path, file: str) -> str:
    try:
        same = read_crc32(folder / file) == index.file_crc32[file]
    except OSError as error:
        return f"{folder / file} cannot be read ({error.strerror})"
    return "" if same else f"{folder / file} was altered since it was written: its checksum differs"
