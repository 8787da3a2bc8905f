"""The states that `infinity.checkpoint.load` reads: those of a checkpoint's files, or of another source.

Files are compared with the checkpoint's index before they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.archive import load_values
from infinity.checkpoint.committed import open_shards
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, Index, file_in, key, read_index
from infinity.checkpoint.piecewise import TensorFile
from infinity.checkpoint.rank_states import Shards
from infinity.checkpoint.tensors import Spec, read_crc32, spec_of
from infinity.comm.communicator import Communicator
from infinity.errors import CheckpointError
from infinity.inputs import open_input
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.formats import StateKind
from infinity.units.states import Flats
from infinity.units.unit import Unit

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
                        expected = Spec(kind.dtype, kind.shape_in(index.parameters[name].shape))
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


PieceOf = Mapping[str, Piece]
"""Name of a parameter → the saved tensor that it is, or is a tile of."""


class SavedStates(Protocol):
    """The states of a training run after one step. Methods raise CheckpointError for what is missing or damaged."""

    path: Path
    """The folder, for messages and callers."""
    index: Index

    def pieces(self, units: Iterable[Unit], model: nn.Module) -> PieceOf: ...
    def check(self, ranks: Communicator, *, verify: bool) -> None:
        """Check that all states can be read. verify: also compare checksums. Collective."""

    def read(self, piece: Piece, kinds: Sequence[StateKind]) -> Flats:
        """Return kind → state of a parameter, in its saved shape. kinds: some of the index's."""

    def read_range(self, piece: Piece, kinds: Sequence[StateKind], start: int, stop: int) -> Flats:
        """Return kind → values of elements [start, stop) of a parameter that a native rule updates, flat.

        start: a multiple of each kind's `per`.
        """

    def buffers(self) -> dict[str, torch.Tensor]: ...
    def client_state(self) -> dict[str, Any]: ...
    def generators(self, ranks: Communicator) -> dict[str, Any] | None:
        """Return this rank's RNG states; None if there are none for this number of ranks."""


class CheckpointFolder:
    """A folder that `save_checkpoint` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the index is missing or damaged."""
        self.path = path
        self.index = read_index(path)
        self._files: dict[str, TensorFile] = {}

    def pieces(self, units: Iterable[Unit], model: nn.Module) -> PieceOf:
        found = Pieces(model)
        pairs = (pair for unit in units for pair in zip(unit.layout.slots, unit.parameters, strict=True))
        return {slot.name: found.of(slot.name, parameter) for slot, parameter in pairs}

    def check(self, ranks: Communicator, *, verify: bool) -> None:
        check_files(self.index, self.path)
        if verify:
            check_contents(self.index, self.path, ranks)

    def read(self, piece: Piece, kinds: Sequence[StateKind]) -> Flats:
        if self.index.shards:
            return {kind.name: self._read_shards(piece, kind) for kind in kinds}
        with safe_open(self.path / self.index.parameters[piece.name].file, framework="pt") as tensors:
            return {kind.name: _read_state(tensors, key(kind.name, piece.name), kind, piece) for kind in kinds}

    def read_range(self, piece: Piece, kinds: Sequence[StateKind], start: int, stop: int) -> Flats:
        return {kind.name: self._read_range(piece, kind, start, stop) for kind in kinds}

    def _read_range(self, piece: Piece, kind: StateKind, start: int, stop: int) -> torch.Tensor:
        if kind.per > 1:
            blocks = piece.blocks(kind.per) if piece.place else slice(0)
            assert blocks is not None, "`Loading` refuses such tiles"
            runs = [((blocks.start or 0) + start // kind.per, kind.length(stop) - start // kind.per)]
        else:
            runs = list(piece.runs(start, stop - start))
        if not self.index.shards:
            file = self._file(self.index.parameters[piece.name].file)
            return file.read(key(kind.name, piece.name), runs, kind.dtype)
        # One read of what lies between runs, too: each opens files.
        low, high = runs[0][0], sum(runs[-1])
        found = self._shards.read(piece.name, kind, low * kind.per, high * kind.per)
        return torch.cat([found[first - low : first - low + numel] for first, numel in runs])

    def _read_shards(self, piece: Piece, kind: StateKind) -> torch.Tensor:
        whole = self._shards.read(piece.name, kind).view(kind.shape_in(self.index.parameters[piece.name].shape))
        return whole[_place_of(kind, piece)].contiguous() if piece.place else whole

    @cached_property
    def _shards(self) -> Shards:
        return open_shards(self.index, self.path)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(file_in(self.path, name))
        return self._files[name]

    def buffers(self) -> dict[str, torch.Tensor]:
        path = file_in(self.path, BUFFERS)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged") from None

    def client_state(self) -> dict[str, Any]:
        path = file_in(self.path, CLIENT_STATE)
        try:
            state = load_values(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the checkpoint is damaged, use another one") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds a {type(state).__name__} instead of a dict: use another checkpoint")
        return state

    def generators(self, ranks: Communicator) -> dict[str, Any] | None:
        return rng.read_states(file_in(self.path, rng.FILE), ranks)


def _read_state(tensors: Any, name: str, kind: StateKind, piece: Piece) -> torch.Tensor:
    """Return a parameter's saved state in its saved shape. A tile is read without the rest of its tensor.

    tensors: a file opened with `safe_open`. name: of the whole state in it.
    """
    if not piece.place:
        whole: torch.Tensor = tensors.get_tensor(name)
        return whole
    part: torch.Tensor = tensors.get_slice(name)[_place_of(kind, piece)]
    return part


def _place_of(kind: StateKind, piece: Piece) -> Any:
    """Return the index of a tile's values in a state of its tensor."""
    return piece.place if kind.per == 1 else piece.blocks(kind.per)
