"""Parameters that are slices of one tensor, which state dicts, checkpoints and exports show whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from infinity.comm.side import Place
from infinity.construction.materialize import Source, note_source, source_of
from infinity.model.added import StateCopies
from infinity.units.compiled import own_name

MARK = "_is_hf_initialized"
"""transformers marks modules that it has initialised."""


@dataclass(frozen=True)
class Piece:
    """Place of a parameter in the tensor that the model's state_dict shows.

    name: key of that tensor in the state_dict. shape: its shape. place: slices of the parameter in it, one for each
    dimension; () for all of it.
    """

    name: str
    shape: tuple[int, ...]
    place: Place = ()

    @property
    def run(self) -> tuple[int, int] | None:
        """The elements [start, stop) of the flattened tensor that the parameter is; None if they are not contiguous."""
        if not self.place:
            return 0, prod(self.shape)
        if any(part.indices(size) != (0, size, 1) for part, size in zip(self.place[1:], self.shape[1:], strict=True)):
            return None
        width = prod(self.shape[1:])
        return self.place[0].start * width, self.place[0].stop * width

    def blocks(self, per: int) -> slice | None:
        """Return the slice of the piece in values that `per` elements of the flattened tensor share; None if it cuts a
        block.
        """
        run, numel = self.run, prod(self.shape)
        if run is None or run[0] % per or (run[1] % per and run[1] != numel):
            return None
        return slice(run[0] // per, -(-run[1] // per))

    def runs(self, first: int, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (first element in the flattened tensor, number of elements) of each contiguous run of the parameter's
        elements [first, first + numel), in order.
        """
        if self.run is not None:
            yield self.run[0] + first, numel
            return
        rows, columns = self.place
        width = columns.stop - columns.start
        while numel:
            row, inside = divmod(first, width)
            count = min(numel, width - inside)
            yield (rows.start + row) * self.shape[1] + columns.start + inside, count
            first, numel = first + count, numel - count

    def spread(self, values: torch.Tensor, first: int, per: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first value in the flattened state of the tensor, part) of each contiguous part of a state's `values`.

        values: of the parameter's elements from number `first` on, which `per` elements share (`StateKind.per`).
        """
        if not self.place:
            yield first // per, values
        elif per > 1:
            blocks = self.blocks(per)
            assert blocks is not None, "`check_tiles` refuses such tiles"
            yield blocks.start + first // per, values
        else:
            flat, done = values.reshape(-1), 0
            for start, numel in self.runs(first, flat.numel()):
                yield start, flat[done : done + numel]
                done += numel


class Pieces:
    """The pieces of a model. All readers and writers of whole tensors take them from here."""

    def __init__(self, model: nn.Module) -> None:
        self._tiles: dict[str, Piece] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, Tiled):
                prefix = own_name(f"{path}.") if path else ""
                for name, piece in module.pieces():
                    self._tiles[prefix + name] = replace(piece, name=prefix + piece.name)

    def of(self, name: str, parameter: torch.Tensor) -> Piece:
        """Return the piece of a parameter, by its name without `torch.compile`'s wrappers. An ordinary parameter is
        all of its tensor.
        """
        return self._tiles.get(name) or Piece(name, tuple(parameter.shape))


class Assembly:
    """Joins tiles, which arrive in any order, to whole tensors."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[str, ...], tuple[torch.Tensor, int]] = {}
        """Names of an incomplete tensor → the tensor, and the number of its elements that are missing."""

    def add(self, pieces: Sequence[Piece], values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for each name of the whole tensor that `values` completes. pieces: one for each name."""
        names, piece = tuple(each.name for each in pieces), pieces[0]
        whole = values
        if piece.place:
            whole, missing = self._wholes.pop(names, (values.new_empty(piece.shape), prod(piece.shape)))
            whole[piece.place] = values
            if missing > values.numel():
                self._wholes[names] = whole, missing - values.numel()
                return
        yield from ((name, whole) for name in names)


class Tiled(nn.Module):
    """A module whose parameters are tiles of larger tensors.

    `state_dict` shows the larger tensors and `load_state_dict` takes them, so both equal those of the untiled module.
    A larger tensor is an alias of its tiles if they are adjacent in one memory, as `infinity.nn.tile` leaves them.
    Otherwise it is a copy; `check_copies` raises if one was edited in place, which an untiled module would follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies = StateCopies()
        self.register_state_dict_post_hook(_show_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]

    @abstractmethod
    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield (name of a parameter, its piece), with names below this module."""

    def check_copies(self) -> None:
        """Raise UsageError if a copy in a state_dict was edited in place."""
        self._copies.check()

    def wholes(self) -> dict[str, dict[str, Piece]]:
        """Return name of a larger tensor → its tiles by name, in order."""
        found: dict[str, dict[str, Piece]] = {}
        for name, piece in self.pieces():
            found.setdefault(piece.name, {})[name] = piece
        return found


def _show_whole(module: Tiled, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace the tiles in `state` by their larger tensors. A state-dict post-hook."""
    for whole, tiles in module.wholes().items():
        if not all(prefix + name in state for name in tiles):
            continue  # another hook has removed or renamed them
        values = [state.pop(prefix + name) for name in tiles]
        state[prefix + whole] = _joined(module, prefix + whole, values, list(tiles.values()))


def _joined(module: Tiled, key: str, values: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> torch.Tensor:
    first, shape = values[0], pieces[0].shape
    shown = any(isinstance(value, nn.Parameter) for value in values)  # keep_vars=True
    if not shown and len({value.untyped_storage()._cdata for value in values}) == 1:
        start, storage = first.storage_offset(), first.untyped_storage()
        if (start + prod(shape)) * first.element_size() <= storage.nbytes():
            whole = first.as_strided(shape, torch.empty(shape, device="meta").stride(), start)
            if all(value.is_set_to(whole[piece.place]) for value, piece in zip(values, pieces, strict=True)):
                return whole
    whole = first.new_empty(shape)
    for value, piece in zip(values, pieces, strict=True):
        whole[piece.place] = value
    if not shown:
        module._copies.note(key, whole)
    return whole


def _cut(
    module: Tiled,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Replace larger tensors in `state` by views of their tiles. A load-state-dict pre-hook.

    A tensor that is missing or has another shape is reported under its own name; its tiles then keep their values.
    """
    for whole, tiles in module.wholes().items():
        if all(prefix + name in state for name in tiles):
            continue
        key, shape = prefix + whole, next(iter(tiles.values())).shape
        value = state.pop(key, None)
        fits = value is not None and getattr(value, "shape", shape) == shape
        if value is None:
            missing_keys.append(key)
        elif not fits:
            sizes = f"{list(value.shape)} in the state dict and {list(shape)} in the model"
            error_msgs.append(f"size mismatch for {key}: it has shape {sizes}.")
        for name, piece in tiles.items():
            tile = value[piece.place] if fits and isinstance(value, torch.Tensor) else value
            state[prefix + name] = tile if fits else module.get_parameter(name)


@dataclass(frozen=True)
class _Part:
    """Reads a part of a flattened parameter from its source. start: the part's first element."""

    source: Source
    start: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(self.start + start, self.start + stop)


def view_of(whole: nn.Parameter, piece: Piece) -> nn.Parameter:
    """Return a parameter that is the piece of `whole`: a view, with its attributes and its source."""
    # On the meta device tiles share the layer's count of edits (`detach`), by which construction checks that none is
    # lost. Elsewhere each has its own (`data`): an edit of one tile is none of another.
    values = whole.detach() if whole.is_meta else whole.data
    part = nn.Parameter(values[piece.place], whole.requires_grad)
    part.__dict__.update(vars(whole))
    source = source_of(whole)
    if source is not None:
        assert piece.run is not None
        note_source(part, _Part(source, piece.run[0]))
    return part


def slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
