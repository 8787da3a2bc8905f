"""Initialises a model unit by unit and moves its values to their tiers, so that construction needs no more memory than
training.

A model built on the meta device is initialised here. Each unit's modules get real parameters on the host, which are
initialised, moved to their tier and released before the next unit. Parameters with a source
(`infinity.construction.materialize`) are read from it instead; each rank reads its shard.

Registry of sources that parameters on the meta device are read from. Filled before the engine is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.comm.dtensor import is_distributed
from infinity.construction.initialize import (
    ParallelDraws,
    apply_rule,
    aside,
    fingerprint,
    is_set,
    reset,
    rules_of,
    seeded,
)
from infinity.construction.replay import FIX, Replay, check_reproducible, name_of, owners, stand_ins
from infinity.errors import ModelError
from infinity.model.hooks import UnitParameters
from infinity.plan.layout import UnitLayout
from infinity.units.released import is_released
from infinity.units.states import Flats, flat_tensor
from infinity.units.unit import placeholder


class Source(Protocol):
    """Reader of one parameter's values."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: (stop - start,), on the host, in any dtype."""
        ...


# Keyed by the parameter itself, since its name changes when its model becomes part of another module.
_sources = WeakIdKeyDictionary()
_loaded = WeakIdKeyDictionary()


def note_source(parameter: nn.Parameter, source: Source) -> None:
    """Register `source` as the origin of the values of `parameter`, which is on the meta device."""
    _sources[parameter] = source


def source_of(parameter: nn.Parameter) -> Source | None:
    found: Source | None = _sources.get(parameter)
    return found


def note_loaded(buffer: torch.Tensor) -> None:
    """Mark `buffer` as loaded: initialising its module must not change it."""
    _loaded[buffer] = True


def check_values(model: nn.Module) -> None:
    """Raise ModelError if values are missing and cannot be made.

    Causes: parameters of another engine, a buffer or a DTensor on the meta device, a module without a rule, or a
    parameter whose rule may not reproduce the values of the model's own code.
    """
    for module in model.modules():
        if isinstance(module._parameters, UnitParameters):
            raise ModelError(
                "the model already belongs to an engine: use that one, or close it with engine.close(restore=True) and "
                "make a new one"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta and is_distributed(parameter):
            raise ModelError(
                f"parameter {name} is a DTensor on the meta device: give the model its values before "
                "parallelize_module, or build it on the cpu"
            )
        if is_released(parameter):
            raise ModelError(
                f"parameter {name} holds no values: the model belonged to an engine that was closed. Build it again, "
                "and load a checkpoint of that engine into the new one, or close the engine with restore=True."
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on the meta device, and no initialisation rule sets it. Compute it under "
                "`with torch.device('cpu')`, or build the model on the cpu."
            )
    rules = rules_of(model)
    for name, module in model.named_modules():
        holds = any(p.is_meta and source_of(p) is None for p in module.parameters(recurse=False))
        if holds and rules[module] is reset and not callable(getattr(module, "reset_parameters", None)):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) was built on the meta device and has no "
                "reset_parameters(). Give it one, give the model an initialize_module(module) method, or build the "
                "model on the cpu or, where it does not fit in memory, under infinity.Init."
            )
    check_reproducible(model, rules, _drawn(model))


def _drawn(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return parameter → name, for the parameters that rules will initialise."""
    return {p: name for name, p in model.named_parameters() if p.is_meta and source_of(p) is None}


def make_buffers(model: nn.Module) -> None:
    """Initialise buffers on the meta device whose modules' rules set them; leave the others there.

    Rules set buffers in transformers from version 5 on (rotary frequencies, causal masks) and in torch's batch norms.
    Each rule runs twice, over zeros and over ones; equal results show that it sets every element.
    """
    rules = rules_of(model)
    for module in model.modules():
        on_meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if not on_meta:
            continue
        made: list[dict[str, torch.Tensor]] = []
        others = {name for name in module._buffers if name not in on_meta}
        with aside(module, set(module._parameters), others), stand_ins(_below(module)):
            for fill in (0, 1):
                made.append({name: torch.full_like(buffer, fill, device="cpu") for name, buffer in on_meta.items()})
                module._buffers.update(made[-1])
                seeded(rules[module], module, 0)
        for name, buffer in on_meta.items():
            module._buffers[name] = made[0][name] if torch.equal(made[0][name], made[1][name]) else buffer


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (each for each in module.modules() if each is not module)


class Materializer:
    """Initialises the parameters of a model on the meta device, unit by unit. A model with values keeps them.

    Each module draws from a seed of its own, derived from one draw of torch's generator and the module's name. So the
    values depend on `torch.manual_seed` and the model alone, not on tiers, units, threads or ranks. They differ from
    those of the model built on the cpu, whose modules draw from one generator in turn, some of them twice.

    seed: the draw. Set it to rank 0's before the first unit, so that each rank may make a part.
    """

    def __init__(self, model: nn.Module, roots: set[str], pool: Executor) -> None:
        """roots: paths of the modules that units stand at. pool: threads that draw random numbers."""
        self._model = model
        self._draws = ParallelDraws(pool)
        self._roots = roots
        self._rules = rules_of(model)
        self._drawn = _drawn(model)
        self._reached = Replay(model, self._rules, self._drawn).reached if self._drawn else {}
        self._reaching = {module for modules in self._reached.values() for module in modules}
        self._owner = owners(model)
        self._paths = {module: path for path, module in model.named_modules()}
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        self.seed = int(torch.randint(1 << 62, ())) if on_meta else 0

    def materialize(
        self, root: str, wanted: Sequence[nn.Parameter], room: Sequence[torch.Tensor | None]
    ) -> tuple[nn.Parameter, ...]:
        """Return the parameters `wanted` of the unit at path `root`, with values on the host.

        room: memory of each one's shape, in which parameters of the same dtype are made. Parameters on the meta device
        without room are returned as placeholders. Shared parameters stay shared over the whole model and get their
        values from the first module that holds them. Raises ModelError if a rule leaves a value unset.
        """
        fresh = {p: _unset(p, place) for p, place in zip(wanted, room, strict=True) if p.is_meta}
        if fresh:
            self._made.update(fresh)
            for module in self._model.modules():
                for name, held in module._parameters.items():
                    if held is not None and held in fresh:
                        module._parameters[name] = fresh[held]
                        self._owner[fresh[held]] = self._owner[held]
            made = {p: fresh[p] for p, place in zip(wanted, room, strict=True) if p in fresh and place is not None}
            left_out = {fresh[p] for p in fresh.keys() - made.keys() if source_of(p) is None}
            if made:
                with self._draws:
                    for path, module in self._scope(self._model.get_submodule(root), root):
                        self._fill(path, module, set(made.values()), left_out)
                    for parameter, value in made.items():
                        self._reach(parameter, value)
                self._check_set(made)
            for parameter in fresh.keys() - made.keys():
                value = fresh[parameter]
                value.data = placeholder(tuple(value.shape), value.dtype, value.device)
        return tuple(self._made.get(parameter, parameter) for parameter in wanted)

    def fingerprint(self) -> bytes:
        """Return `initialize.fingerprint` of the model; empty if a rule edits parameters of other modules."""
        if self._reached:
            return b""
        with self._draws:
            return fingerprint(self._model, self._rules, self._drawn)

    def _scope(self, module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield (path, module), children before parents as in `Module.apply`, without subtrees of other units."""
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path not in self._roots:
                yield from self._scope(child, child_path)
        yield path, module

    def _fill(
        self, path: str, module: nn.Module, values: set[nn.Parameter], left_out: Collection[nn.Parameter]
    ) -> None:
        """Initialise one module. Stand-ins replace parameters outside `values` or shared with an earlier module.

        A module without values is skipped if it has parameters in `left_out`, which another rank makes. Its buffers are
        made on every rank.
        """
        own = {name: held for name, held in module._parameters.items() if held is not None}
        others = {name for name, held in own.items() if not (held in values and self._owner[held] is module)}
        if others == own.keys() and any(held in left_out for held in own.values()) and not module._buffers:
            return
        loaded = {name for name, buffer in module._buffers.items() if buffer is not None and buffer in _loaded}
        with aside(module, others, loaded), stand_ins(_below(module) if module in self._reaching else ()):
            apply_rule(self._rules[module], module, self._seed_of(path), others)

    def _reach(self, parameter: nn.Parameter, made: nn.Parameter) -> None:
        """Apply the rules of enclosing modules that edit this parameter. Stand-ins replace all other parameters."""
        for module in self._reached.get(parameter, ()):
            with stand_ins(module.modules(), keep=made):
                seeded(self._rules[module], module, self._seed_of(self._paths[module], self._drawn[parameter]))

    def _seed_of(self, *names: str) -> int:
        own_seed = hashlib.blake2b("\0".join(names).encode(), digest_size=8, key=self.seed.to_bytes(8, "little"))
        return int.from_bytes(own_seed.digest(), "little")

    def _check_set(self, made: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for parameter, value in made.items():
            if not is_set(value):
                owner = self._owner[parameter]
                rule = self._rules[owner]
                raise ModelError(
                    f"parameter {self._drawn[parameter]} ({type(owner).__name__}) was built on the meta device, and "
                    f"{name_of(rule)} does not set it, or not all of it. {FIX}"
                )


def _unset(parameter: nn.Parameter, room: torch.Tensor | None) -> nn.Parameter:
    """Return a parameter on the host, in `room` if it fits.

    With room, a rule will set it; it is NaN, which reveals values left unset.
    """
    fits = room is not None and room.dtype == parameter.dtype and parameter.is_contiguous()
    value = room if fits and room is not None else torch.empty_like(parameter, device="cpu")
    if room is not None and value.is_floating_point():
        value.fill_(math.nan)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def empty_states(layout: UnitLayout) -> Flats:
    """Return zeros for a unit's states before the first step: `master` in fp32, or `param` for a frozen unit, each
    (numel,). Moments are left out, since they are zero.
    """
    name, dtype = ("master", torch.float32) if layout.trainable else ("param", layout.dtype)
    return {name: flat_tensor(layout.numel, dtype)}


def put(value: torch.Tensor, place: torch.Tensor) -> None:
    """Copy `value` to `place`, of the same shape, unless it was made there."""
    if not value.is_set_to(place):
        # A rule may have made it another view of the same memory.
        overlaps = value.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
        place.copy_(value.clone() if overlaps else value)


def read_shard(layout: UnitLayout, flat: torch.Tensor, sources: Sequence[Source | None], rank: int) -> None:
    """Read the part of the parameters with sources that lies in the shard of `rank` into `flat` (numel,)."""
    low, high = layout.shard_range(rank)
    for slot, source in zip(layout.slots, sources, strict=True):
        start, stop = max(slot.offset, low), min(slot.stop, high)
        if source is not None and start < stop:
            flat[start:stop].copy_(source.read(start - slot.offset, stop - slot.offset))
