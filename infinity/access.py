"""Parameters, gradients and optimizer states whole, wherever their shards live: to look at, and to change.

    with infinity.GatheredParameters(model.head.parameters(), modifier_rank=0):
        if rank == 0:
            torch.nn.init.zeros_(model.head.bias)

    master = infinity.get_full_fp32_param(model.head.weight)
    infinity.set_full_optimizer_state(model.head.weight, "exp_avg", torch.zeros_like(master))

A parameter that is read as an attribute (`model.head.weight`) while an engine is open is fetched all the same; what is
here keeps it there, is the same on all ranks, and reaches the exact values behind 16-bit parameters. All ranks call
these functions, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.checkpoint.format import view
from infinity.errors import UsageError
from infinity.optim.formats import StateKind, convert_moment, fp32_moment
from infinity.optim.moments import MOMENT_NAMES, rounding_key
from infinity.units.states import Flats
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.engine import Engine
    from infinity.runner import Runner

__all__ = [
    "GatheredParameters",
    "get_full_fp32_param",
    "get_full_grad",
    "get_full_optimizer_state",
    "set_full_fp32_param",
    "set_full_grad",
    "set_full_optimizer_state",
]

_engines: weakref.WeakSet[Runner] = weakref.WeakSet()


def opened(engine: Runner) -> None:
    """`engine` has parameters from now on."""
    _engines.add(engine)


def closed(engine: Runner) -> None:
    _engines.discard(engine)


class GatheredParameters:
    """Hold parameters whole, in the memory that the model computes in, until the block ends.

    params: one or more parameters of an open engine; those that are not an engine's are left alone.
    modifier_rank: the rank whose changes in the block become everybody's; without it nothing should be changed, unless
        all ranks make the same change.

    Raises InfinityError if they are more than there are buffers for: gather fewer at a time.
    """

    def __init__(self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        found = [_find(param) for param in given]
        self._units = list(dict.fromkeys((engine, unit) for engine, unit, _ in filter(None, found)))
        self._units.sort(key=lambda pair: pair[1].index)
        self._held: list[tuple[Runner, Unit]] = []
        self._modifier = modifier_rank
        for engine, _ in self._units:
            if modifier_rank is not None and not 0 <= modifier_rank < engine.ranks.size:
                raise UsageError(f"modifier_rank is {modifier_rank}: give a rank from 0 to {engine.ranks.size - 1}")

    def __enter__(self) -> GatheredParameters:
        try:
            for engine, unit in self._units:
                engine.parts.store.hold(unit)
                self._held.append((engine, unit))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._modifier is not None and error[0] is None:
            for engine, unit in self._held:
                unit.adopt_assigned()
                engine.ranks.broadcast(unit.flat(), source=self._modifier)
        self._release()

    def _release(self) -> None:
        for engine, unit in self._held:
            engine.parts.store.unhold(unit)
        self._held = []


def get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The exact value, fp32 in the parameter's shape, in host memory: the master of a parameter that is trained."""
    engine, unit, slot = _owner(param)
    values = _read(engine, unit)[_param_kind(engine, unit), slot].float().clone()
    return engine.ranks.model.whole(param, values)


def set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change it to `value`, of the parameter's shape; a parameter in 16 bits becomes `value` rounded."""
    engine, unit, slot = _owner(param)
    _check(value, param, unit, slot)
    states = _read(engine, unit)
    states[_param_kind(engine, unit), slot].copy_(engine.ranks.model.part(param, value))
    states.write()


def get_full_optimizer_state(param: nn.Parameter, name: str) -> torch.Tensor:
    """A moment (`exp_avg`, `exp_avg_sq`, `sum`, `momentum_buffer`: those of the optimizer), fp32 in the parameter's
    shape, in host memory, whatever it is kept in.
    """
    engine, unit, slot = _owner(param)
    _check_moment(engine, unit, name)
    return engine.ranks.model.whole(param, fp32_moment(name, _read(engine, unit).of_slot(slot)))


def set_full_optimizer_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Change it to `value`, of the parameter's shape, rounded as an update rounds where it is kept in fewer bits."""
    engine, unit, slot = _owner(param)
    _check_moment(engine, unit, name)
    _check(value, param, unit, slot)
    states = _read(engine, unit)
    rule, layout = engine.config.optimizer.rule, unit.layout
    key, first = rounding_key(engine.config.infinity.seed, unit.steps[slot]), layout.first + layout.slots[slot].offset
    given = {name: engine.ranks.model.part(param, value.detach().cpu().float())}
    convert_moment(rule, name, given, states.of_slot(slot), key=key, first=first)
    states.write()


def get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of the present step, fp32 in the parameter's shape, in host memory: the mean over ranks and
    micro-batches, without loss scale, before clipping. None if there is none.

    To be called between the last `backward` of a step and `step`. UsageError if the update has taken it already: set
    infinity.update to "next_forward" or "after_backward".
    """
    found = _with_grad(param)
    if found is None:
        return None
    engine, unit, slot = found
    flat = engine.parts.gradients.read(unit)
    place = unit.layout.slots[slot]
    factor = engine.ranks.size * engine.loss_scale.value
    values = flat[place.offset : place.stop].view(place.shape).float() / factor
    return engine.ranks.model.whole(param, values)


def set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change it to `value`, of the parameter's shape; see `get_full_grad`. UsageError if there is none."""
    _, unit, slot = _owner(param)
    _check(value, param, unit, slot)
    found = _with_grad(param)
    if found is None:
        name = unit.layout.slots[slot].name
        raise UsageError(f"{name} has no gradient in this step: set it between backward and step")
    engine = found[0]
    flat = engine.parts.gradients.read(unit)
    place = unit.layout.slots[slot]
    factor = engine.ranks.size * engine.loss_scale.value
    mine = engine.ranks.model.part(param, value)
    flat[place.offset : place.stop].view(place.shape).copy_(mine * factor)
    engine.parts.gradients.write(unit, flat)


class _States:
    """A unit's states, whole on every rank, by kind and slot."""

    def __init__(self, engine: Runner, unit: Unit) -> None:
        self._engine, self._unit = engine, unit
        self._flats: Flats = engine.parts.states.read(unit.layout)

    def __getitem__(self, which: tuple[StateKind, int]) -> torch.Tensor:
        kind, slot = which
        return view(kind, self._unit.layout.slots[slot], self._flats[kind.name])

    def of_slot(self, slot: int) -> dict[str, torch.Tensor]:
        """A parameter's states by name."""
        return {kind.name: self[kind, slot] for kind in self._engine.parts.states.kinds(self._unit.layout)}

    def write(self) -> None:
        """Every rank its shard."""
        self._unit.copied.wait()
        self._engine.parts.states.write(self._unit.layout, self._flats)
        self._engine.parts.store.rewritten(self._unit)


def _read(engine: Runner, unit: Unit) -> _States:
    engine.settle()
    return _States(engine, unit)


def _find(param: Any) -> tuple[Runner, Unit, int] | None:
    """The open engine, the unit and the slot of a parameter."""
    for engine in list(_engines):
        unit = engine.parts.unit_of.get(id(param))
        if unit is not None:
            slot = next(number for number, held in enumerate(unit.parameters) if held is param)
            return engine, unit, slot
    return None


def _owner(param: Any) -> tuple[Runner, Unit, int]:
    found = _find(param)
    if found is None:
        raise UsageError("this is no parameter of an open engine: pass one of the model's, as model.head.weight")
    return found


def _param_kind(engine: Runner, unit: Unit) -> StateKind:
    """Its master, or a frozen parameter as it is."""
    return engine.parts.states.kinds(unit.layout)[0]


def _check(value: torch.Tensor, param: nn.Parameter, unit: Unit, slot: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"the value for {unit.layout.slots[slot].name} is a {type(value).__name__}: pass a tensor of shape "
            f"{list(param.shape)}"
        )
    if value.shape != param.shape:
        name, shapes = unit.layout.slots[slot].name, f"{list(param.shape)}, the value {list(value.shape)}"
        raise UsageError(f"{name} has shape {shapes}: pass a value of the parameter's shape")


def _check_moment(engine: Runner, unit: Unit, name: str) -> None:
    names = MOMENT_NAMES[engine.config.optimizer.rule]
    if not unit.layout.trainable or name not in names:
        kept = f"the optimizer keeps {', '.join(names)}" if unit.layout.trainable else "the parameter is frozen"
        raise UsageError(f"there is no state {name!r}: {kept}")


def _with_grad(param: Any) -> tuple[Engine, Unit, int] | None:
    """As `_owner`, of a parameter that has a gradient in this step; None if it has not."""
    from infinity.engine import Engine

    engine, unit, slot = _owner(param)
    if not isinstance(engine, Engine):
        return None
    collector, gradients = engine.parts.collector, engine.parts.gradients
    if collector.is_collecting(unit):
        raise UsageError("gradients are summed up in the last micro-batch of a step: call engine.backward for it first")
    if unit.index in gradients.units:
        gradients.settle()
        return (engine, unit, slot) if slot in gradients.slots[unit.index] else None
    if collector.is_updating(unit):
        raise UsageError(
            f"the gradient of unit {unit.name} is gone: it was updated during backward. Set infinity.update to "
            '"next_forward" or "after_backward"'
        )
    return None
