"""Tiles of larger tensors in checkpoints, whose files hold the larger tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.format import Index, key, shape_of
from infinity.checkpoint.tensors import Spec
from infinity.checkpoint.writer import Writer
from infinity.comm.dtensor import is_distributed
from infinity.errors import ModelError
from infinity.nn.pieces import Piece, Pieces
from infinity.plan.formats import StateKind
from infinity.plan.layout import UnitLayout


def check_tiles(
    model: nn.Module, layouts: Iterable[UnitLayout], kinds: Callable[[torch.dtype], Iterable[StateKind]] | None
) -> None:
    """Raise ModelError if tiles of a tensor differ in a property that checkpoints save once for the tensor.

    kinds: dtype → the states of trained parameters; None for inference.
    """
    pieces, parameters = Pieces(model), dict(model.named_parameters())
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for layout in layouts:
        for slot in layout.slots:
            parameter = parameters.get(slot.name)
            piece = pieces.of(slot.name, parameter) if parameter is not None else Piece(slot.name, slot.shape)
            if not piece.place:
                continue
            if parameter is not None and is_distributed(parameter):
                raise ModelError(
                    f"{slot.name} is a DTensor and a tile of {piece.name}: shard nn.Linear instead of tiles"
                )
            shown = {"requires_grad": layout.trainable, "dtype": layout.dtype, "param_group": slot.group}
            name, expected = first.setdefault(piece.name, (slot.name, shown))
            if differs := [key for key in shown if shown[key] != expected[key]]:
                raise ModelError(
                    f"{name} and {slot.name} are tiles of {piece.name}, of which a checkpoint saves one {differs[0]}, "
                    f"and they have {expected[differs[0]]} and {shown[differs[0]]}: treat them alike"
                )
            for kind in kinds(layout.dtype) if layout.trainable and kinds is not None else ():
                if problem := block_problem(slot.name, piece, kind):
                    raise ModelError(
                        f"infinity.moments is '8bit', and {problem}. Let max_bytes choose the rows of tiles, without "
                        f"in_splits ({kind.per} rows fit any width), or use moments in bf16 or fp32"
                    )


def block_problem(name: str, piece: Piece, kind: StateKind) -> str | None:
    """Return the problem, for an error, if a tile cuts blocks of elements that share a value of a state; else None."""
    if not piece.place or kind.per == 1 or piece.blocks(kind.per) is not None:
        return None
    return (
        f"{name}, a tile of {piece.name}, begins or ends within one of its blocks of {kind.per} elements with a scale"
    )


def read_state(tensors: Any, name: str, kind: StateKind, piece: Piece) -> torch.Tensor:
    """Return a parameter's saved state in its saved shape. A tile is read without the rest of its tensor.

    tensors: a file opened with `safe_open`. name: of the whole state in it.
    """
    if not piece.place:
        whole: torch.Tensor = tensors.get_tensor(name)
        return whole
    part: torch.Tensor = tensors.get_slice(name)[place_of(kind, piece)]
    return part


def place_of(kind: StateKind, piece: Piece) -> Any:
    """Return the index of a tile's values in a state of its tensor."""
    return piece.place if kind.per == 1 else piece.blocks(kind.per)


def write_tile(writer: Writer, index: Index, kind: StateKind, piece: Piece, values: torch.Tensor) -> None:
    """Write a tile's state into the file of its larger tensor."""
    file = writer.piecewise(index.parameters[piece.name].file, _specs(index, piece.name))
    if kind.per > 1:
        blocks = piece.blocks(kind.per)
        assert blocks is not None, "`check_tiles` refuses such tiles"
        file.write(key(kind.name, piece.name), blocks.start, values)
        return
    for start, part in piece.parts(values):
        file.write(key(kind.name, piece.name), start, part)


def _specs(index: Index, name: str) -> dict[str, Spec]:
    shape = index.parameters[name].shape
    return {key(kind.name, name): Spec(kind.dtype, shape_of(kind, shape)) for kind in index.kinds(name)}
