"""Yields the weights of an engine's model one by one, for an inference engine or another model.

    for name, value in infinity.stream_weights(engine, dtype=torch.bfloat16):
        inference.load_weights([(name, value)])

`_Stream` keeps ranks in step. Before each tensor of sharded weights, every rank reports that it reads on or that it
stops; if one stops, the others raise an error before a collective of the unit has begun.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.format import aliases_of_buffers, persistent_buffers
from infinity.comm.agreement.announcements import Operation
from infinity.engine.adapters import Adapters, Merge
from infinity.engine.base import BaseEngine, open_engines
from infinity.errors import InfinityError, ModelError, RanksError, UsageError
from infinity.nn.pieces import Assembly, Piece, Pieces
from infinity.units.compiled import own_name
from infinity.units.released import own_type
from infinity.units.stored import beside_codes, is_wrapper
from infinity.units.unit import Unit

_SHOWN = 5
"""Names in an error."""


def stream_weights(
    engine: Any, names: Iterable[str] | None = None, dtype: torch.dtype | None = None, merge_adapters: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of every parameter and persistent buffer, unit by unit. Collective, between two steps.

    engine: an engine, or its model. names: yield only these, which are names after the merge; by default all. dtype: of
    floating-point parameters; by default the dtype that each computes in. Buffers, and float8 weights with
    their scales, are never cast. merge_adapters: merge peft's active LoRA adapters, with the bits of
    `merge_and_unload()`; the model does not change. Names are then those of the plain model: without
    `base_model.model.`, `.base_layer` and adapters. False: every parameter, under its own name.

    Names are the keys of the model's `state_dict()`, in the order of units. A shared parameter is yielded under each of
    its names, one after the other, as the same tensor. Values are unsharded on every rank, on the engine's device; a
    layer that `infinity.nn.tile` cut is in host memory, since its tiles together may exceed the device. Each tensor is
    the caller's own, and the engine keeps no reference to it. Beside the engine's buffers, memory is needed for one
    tensor, or three while adapters are merged into it, and for the tensors that the caller keeps.

    Pending updates are executed first. Any other call of the engine, such as a forward, ends the stream: the next
    tensor raises UsageError, since values before and after it could belong to different steps. A caller may stop at any
    time. In stages 1 to 3 all ranks must stop at the same tensor; otherwise those that ask for more raise RanksError,
    and the engine is usable.

    Raises, before the first tensor: UsageError between backward and step, for unknown names, and with tensor
    parallelism; ModelError for adapters that cannot be merged and for quantised layers; RanksError on all ranks if
    their arguments differ.
    """
    source = _engine_of(engine)
    source.settle_between_steps("a stream of weights", Operation.STREAM_WEIGHTS)
    contents = _agreed(source, lambda: _contents(source, names, dtype, merge_adapters))
    stream = _Stream(source)
    source.open_stream(stream.end)
    try:
        yield from _tensors(source, stream, contents)
    finally:
        stream.end()


class _Stream:
    """An open stream: ranks with shards agree before each tensor that all of them go on."""

    def __init__(self, engine: BaseEngine) -> None:
        self._ranks, self._ended = engine.ranks, False

    def go_on(self, name: str) -> None:
        """Wait until all ranks ask for the tensor `name`. Raises UsageError after `end`, RanksError if a rank ended."""
        if self._ended:
            raise UsageError(
                f"the engine was used while stream_weights() was open, before {name}, so that values could belong to "
                "different steps: read the stream to its end, or close it, before other calls"
            )
        if self._ranks.shards == 1:
            return
        try:
            ended = self._ranks.ended_streams(False).result()
        except BaseException:
            self._ended = True  # the ranks are out of step: no further exchange
            raise
        if ended:
            self._ended = True
            raise RanksError(
                f"rank {', '.join(map(str, ended))} stopped reading stream_weights() before {name}, which this rank "
                "asked for: read it on all ranks up to the same tensor. The engine is intact."
            )

    def end(self) -> None:
        """Report to the other ranks that this one asks for no more. Idempotent; does not wait."""
        if not self._ended:
            self._ended = True
            if self._ranks.shards > 1:
                with suppress(RuntimeError, RanksError):  # the engine is closed or has stopped
                    self._ranks.ended_streams(True)


@dataclass(frozen=True)
class _Contents:
    """Everything that a stream yields. parameters: by unit and slot, with the dtype to cast to. digest: of the
    arguments, to compare ranks.
    """

    parameters: Sequence[tuple[Unit, int, list[Piece], Merge | None, torch.dtype | None]]
    buffers: Sequence[tuple[str, torch.Tensor]]
    digest: int


def _contents(
    engine: BaseEngine, names: Iterable[str] | None, dtype: torch.dtype | None, merge_adapters: bool
) -> _Contents:
    """Check the arguments, and return the tensors to yield."""
    if isinstance(names, str):
        raise UsageError(f"names is the text {names!r}: pass a list of names")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype is {dtype!r}: pass a dtype of torch, such as torch.bfloat16")
    if engine.ranks.model.size > 1:
        raise UsageError(
            "stream_weights() was called for a model with tensor parallelism, which it does not support: use "
            "engine.stream_state_dict()"
        )
    wanted, adapters = None if names is None else list(names), Adapters(engine.module, merge=merge_adapters)
    keeps = _keeper(wanted)
    pieces = _pieces(engine.module, adapters)
    _check_wrappers(engine.module, pieces, keeps)
    parameters, codes = [], beside_codes(engine.module)
    for unit in engine.units:
        for slot, parameter in enumerate(unit.parameters):
            kept = [piece for piece in pieces.get(id(parameter), []) if keeps(piece.name)]
            if kept:
                wanted_dtype = dtype if parameter.is_floating_point() and id(parameter) not in codes else None
                parameters.append((unit, slot, kept, adapters.merges.get(id(parameter)), wanted_dtype))
    buffers = [(name, buffer) for name, buffer in _buffers(engine.module, adapters) if keeps(name)]
    found = {piece.name for _, _, kept, *_ in parameters for piece in kept} | {name for name, _ in buffers}
    missing = [name for name in dict.fromkeys(wanted or []) if name not in found]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise UsageError(
            f"the model has no weights named {shown}: pass keys of its state_dict(), after a merge those of the plain "
            "model"
        )
    _check_plain(engine.module, {id(unit.parameters[slot]) for unit, slot, *_ in parameters})
    digest = zlib.crc32(repr((sorted(found), dtype, merge_adapters)).encode())  # not `hash`, which differs by process
    return _Contents(parameters, buffers, digest)


def _keeper(wanted: list[str] | None) -> Callable[[str], bool]:
    return (lambda name: True) if wanted is None else set(wanted).__contains__


def _pieces(model: nn.Module, adapters: Adapters) -> dict[int, list[Piece]]:
    """Return id(parameter) → its places in the tensors of the merged model's state_dict."""
    places, found = Pieces(model), dict[int, list[Piece]]()
    for own, parameter in model.named_parameters(remove_duplicate=False):
        piece = places.of(own_name(own), parameter)
        name = adapters.name(piece.name)
        if name is not None:
            found.setdefault(id(parameter), []).append(Piece(name, piece.shape, piece.place))
    return found


def _buffers(model: nn.Module, adapters: Adapters) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of persistent buffers, a shared one under each of its names."""
    aliases = aliases_of_buffers(model)
    for first, buffer in persistent_buffers(model).items():
        for own in (first, *(alias for alias, of in aliases.items() if of == first)):
            name = adapters.name(own)
            if name is not None:
                yield name, buffer


def _check_wrappers(model: nn.Module, pieces: dict[int, list[Piece]], keeps: Callable[[str], bool]) -> None:
    """Raise ModelError for a parameter to yield that is a tensor subclass, of which units hold the inner tensors."""
    for parameter in filter(is_wrapper, model.parameters()):
        if kept := [piece.name for piece in pieces.get(id(parameter), []) if keeps(piece.name)]:
            raise ModelError(
                f"{kept[0]} is a {own_type(parameter).__name__}, which stream_weights() does not decode: leave it out "
                "by names=, or load the base in 16 bits"
            )


def _check_plain(model: nn.Module, parameters: set[int]) -> None:
    """Raise ModelError if a module shows one of `parameters` otherwise in its state_dict, as quantised layers do."""
    for path, module in model.named_modules():
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict and any(
            id(parameter) in parameters for parameter in module.parameters(recurse=False)
        ):
            raise ModelError(
                f"{path} is a {type(module).__name__}, whose state_dict holds more than its parameters, as that of a "
                "quantised layer does: leave it out by names=, or load the base in 16 bits"
            )


def _agreed(engine: BaseEngine, contents: Callable[[], _Contents]) -> _Contents:
    """Return `contents()`. Raises RanksError on all ranks if its digest differs, and its error if all have one."""
    found, failure = None, None
    try:
        found = contents()
    except InfinityError as error:
        failure = error
    said = engine.ranks.gather((None, str(failure)) if found is None else (found.digest, ""))
    if failure is not None:
        raise failure
    assert found is not None
    for rank, (digest, problem) in enumerate(said):
        if digest != found.digest:
            reason = f"its arguments raised an error: {problem}" if problem else "its arguments differ from this rank's"
            raise RanksError(
                f"rank {rank} called stream_weights(), and {reason}. Pass the same names, dtype and merge_adapters on "
                "all ranks. The engine is intact."
            )
    return found


def _tensors(engine: BaseEngine, stream: _Stream, contents: _Contents) -> Iterator[tuple[str, torch.Tensor]]:
    assembly = Assembly()
    for unit, slot, pieces, merge, dtype in contents.parameters:
        stream.go_on(pieces[0].name)
        # No variable here holds a value: the caller decides how long it lives.
        yield from assembly.add(pieces, _value(engine, unit, slot, merge, pieces, dtype))
    copies: dict[int, torch.Tensor] = {}
    for name, buffer in contents.buffers:
        if id(buffer) not in copies:
            stream.go_on(name)
            copies = {id(buffer): buffer.detach().clone()}  # names of a shared buffer follow each other
        yield name, copies[id(buffer)]


@torch.no_grad()
def _value(
    engine: BaseEngine, unit: Unit, slot: int, merge: Merge | None, pieces: Sequence[Piece], dtype: torch.dtype | None
) -> torch.Tensor:
    """Return a copy of a parameter, merged and cast, on the device, or a tile's in host memory."""
    parts = engine.parts

    def read(parameter: nn.Parameter) -> torch.Tensor:
        # One unit at a time: buffers need not have room for a layer and its adapters.
        of = parts.unit_of[id(parameter)]
        parts.runner.hold(of)
        try:
            return parameter.detach().clone()
        finally:
            parts.runner.unhold(of)

    parameter: Any = unit.parameters[slot]
    value = read(parameter) if merge is None else merge.value(read)
    return value.to(parts.device.host if pieces[0].place else value.device, dtype or value.dtype)


def _engine_of(engine: Any) -> BaseEngine:
    """Return the engine that is meant: itself, or the one of this model or of its wrapper's."""
    if isinstance(engine, BaseEngine):
        return engine
    model = getattr(engine, "module", engine)
    for each in list(open_engines):
        if each.module is model:
            return each
    raise UsageError(
        f"stream_weights() was given a {type(engine).__name__}, which is neither an open engine nor the model of one: "
        "pass what infinity.initialize() returned"
    )
