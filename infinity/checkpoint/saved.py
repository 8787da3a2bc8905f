"""The states that `infinity.checkpoint.load` reads: those of a checkpoint's files, or of another source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from infinity.checkpoint import rng
from infinity.checkpoint.committed import open_shards
from infinity.checkpoint.format import BUFFERS, CLIENT_STATE, Index, file_in, key, read_index, shape_of
from infinity.checkpoint.pickles import load_values
from infinity.checkpoint.rank_states import Shards
from infinity.checkpoint.tiles import place_of, read_state
from infinity.checkpoint.verify import check_contents, check_files
from infinity.comm.communicator import Communicator
from infinity.errors import CheckpointError
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.formats import StateKind
from infinity.units.records import Flats
from infinity.units.unit import Unit

PieceOf = Mapping[str, Piece]
"""Name of a parameter → the saved tensor that it is, or is a tile of."""


class SavedStates(Protocol):
    """The states of a training run after one step. Methods raise CheckpointError for what is missing or damaged."""

    @property
    def path(self) -> Path:
        """The folder, for messages and callers."""

    @property
    def index(self) -> Index: ...
    def pieces(self, units: Iterable[Unit], model: nn.Module) -> PieceOf: ...
    def check(self, ranks: Communicator, *, verify: bool) -> None:
        """Check that all states can be read. verify: also compare checksums. Collective."""

    def read(self, piece: Piece, kinds: Sequence[StateKind]) -> Flats:
        """Return kind → state of a parameter, in its saved shape. kinds: some of the index's."""

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
            return {kind.name: read_state(tensors, key(kind.name, piece.name), kind, piece) for kind in kinds}

    def _read_shards(self, piece: Piece, kind: StateKind) -> torch.Tensor:
        whole = self._shards.read(piece.name, kind).view(shape_of(kind, self.index.parameters[piece.name].shape))
        return whole[place_of(kind, piece)].contiguous() if piece.place else whole

    @cached_property
    def _shards(self) -> Shards:
        return open_shards(self.index, self.path)

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
