"""Reads and edits whole parameters, gradients and optimizer states, regardless of sharding and tiers.

    with infinity.GatheredParameters(model.head.parameters(), modifier_rank=0):
        if rank == 0:
            torch.nn.init.zeros_(model.head.bias)

    master = infinity.get_full_fp32_param(model.head.weight)
    infinity.set_full_optimizer_state(model.head.weight, "exp_avg", torch.zeros_like(master))

Reading an attribute (`model.head.weight`) also gathers the parameter. These functions keep it gathered, apply edits on
all ranks, and give access to the fp32 masters of 16-bit parameters. They are collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from infinity.comm.agreement.announcements import Announcement, Operation
from infinity.engine.base import BaseEngine, open_engines
from infinity.engine.training import TrainingEngine
from infinity.errors import OutOfMemoryError, RanksError, UsageError
from infinity.observe.log import logger
from infinity.optim.moments import convert_moment, fp32_moment, rounding_key
from infinity.plan.pools import UNITS
from infinity.rules import RULES
from infinity.tier_kind import TierKind
from infinity.units.binding import adopt_assigned
from infinity.units.buffers import EXTRA
from infinity.units.states import Flats
from infinity.units.stored import is_wrapper, stored
from infinity.units.unit import Unit

__all__ = [
    "GatheredParameters",
    "get_full_fp32_param",
    "get_full_grad",
    "get_full_optimizer_state",
    "set_full_fp32_param",
    "set_full_grad",
    "set_full_optimizer_state",
]

_LESS = (
    "gather fewer parameters at a time; to read weights, take infinity.stream_weights(engine), which holds one at a "
    "time; or gather none, since a parameter is fetched where it is read (TRL: ds3_gather_for_generation=False)"
)


class GatheredParameters:
    """Gather parameters and hold them unsharded on the device of the model until the block ends.

    params: one or more parameters of an open engine; other parameters are ignored.
    modifier_rank: rank whose edits are broadcast at the end of the block, also if it ends with an exception, which
        all ranks must then raise. By default, all ranks must make the same edits.

    The block takes memory of its own for parameters that the engine's buffers cannot hold at once, and logs its bytes.
    Raises OutOfMemoryError on all ranks if it does not fit; gather fewer parameters at a time then.
    """

    _gathered: ClassVar[set[Unit]] = set()
    """Units of the open blocks."""

    def __init__(self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None) -> None:
        owners = map(_find, _stored([params] if isinstance(params, torch.Tensor) else params))
        self._units: dict[BaseEngine, list[Unit]] = {}
        for engine, unit in dict.fromkeys((engine, unit) for engine, unit, _ in filter(None, owners)):
            self._units.setdefault(engine, []).append(unit)
        self._held: list[tuple[BaseEngine, Unit]] = []
        self._ours: set[Unit] = set()
        """Held units of which no other open block decides whether edits stay: those that none held before."""
        self._room: list[tuple[BaseEngine, Counter[int]]] = []
        self._modifier = modifier_rank
        for engine in self._units:
            if modifier_rank is not None and not 0 <= modifier_rank < engine.ranks.size:
                raise UsageError(f"modifier_rank is {modifier_rank}: pass a rank from 0 to {engine.ranks.size - 1}")

    def __enter__(self) -> GatheredParameters:
        try:
            for engine, units in self._units.items():
                _start_updates(engine)
                self._hold(engine, sorted(units, key=lambda unit: unit.index))
        except BaseException:
            self._release()
            raise
        self._ours = {unit for _, unit in self._held} - self._gathered
        self._gathered.update(self._ours)
        return self

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        self._gathered.difference_update(self._ours)
        try:
            if error is None or isinstance(error, Exception):  # a script may catch it, and go on with the parameters
                self._share_edits()
        except RanksError:
            if error is None:
                raise  # otherwise the block's own error is the cause
        finally:
            self._release()

    def _share_edits(self) -> None:
        if self._modifier is None:
            return
        for engine, unit in self._held:
            if engine not in open_engines:
                continue  # closed in the block
            engine.parts.runner.use(unit)  # an update in the block takes the parameters from their buffer
            adopt_assigned(unit, engine.parts.device.recorder)
            engine.ranks.broadcast(unit.flat(), self._modifier, unit.index)
            engine.parts.store.write_back.check_code(unit)

    def _hold(self, engine: BaseEngine, units: list[Unit]) -> None:
        gathers = engine.ranks.shards > 1 and not self._gathered.issuperset(units)
        if gathers or self._modifier is not None:  # otherwise the block exchanges nothing
            indices = [unit.index for unit in units]
            engine.ranks.begin(Announcement.of_units(Operation.GATHER_PARAMETERS, indices, self._modifier))
        self._room.append((engine, make_room(engine, units)))
        for unit in units:
            engine.parts.runner.hold(unit)
            self._held.append((engine, unit))

    def _release(self) -> None:
        for engine, unit in self._held:
            engine.parts.runner.unhold(unit)
        for engine, sizes in self._room:
            engine.parts.store.buffers.revoke(sizes)
        self._held, self._room = [], []


def make_room(engine: BaseEngine, units: Sequence[Unit]) -> Counter[int]:
    """Let the engine make the buffers that are missing to hold `units` at once, and return size → their number.

    Pass the result to `engine.parts.store.buffers.revoke`. Collective if more than `EXTRA` of a size are missing.
    Raises OutOfMemoryError on all ranks if they do not fit on one.
    """
    buffers = engine.parts.store.buffers
    sizes = buffers.missing(units)
    if max(sizes.values(), default=0) <= EXTRA:  # may be made at any time
        return Counter()
    needed = sum(size * count for size, count in sizes.items())
    check_room(engine, needed)
    if needed > engine.parts.most_gathered:  # more than each block before
        engine.parts.note_gathered(needed)
        if engine.ranks.is_main_rank:
            logger.warning(
                "GatheredParameters holds %d units at once, for which the plan has too few buffers: %d more take %s "
                "bytes on each rank until its block ends. To avoid it, %s.",
                len(units),
                sizes.total(),
                f"{needed:,}",
                _LESS,
            )
    buffers.grant(sizes)
    return sizes


def check_room(engine: BaseEngine, needed: int) -> None:
    """Raise OutOfMemoryError on all ranks if `needed` bytes of the model's memory are too many on one. Collective."""
    available, memory = min(engine.ranks.gather(min(_spaces(engine))))
    if needed > available:
        raise OutOfMemoryError(memory, needed, available, _LESS)


def _spaces(engine: BaseEngine) -> Iterator[tuple[int, str]]:
    """Yield bytes that may be added in a memory, with its name for an error: the available memory of this rank, and the
    rest of each limit of `infinity.memory` that a user has set.
    """
    parts = engine.parts
    plan = parts.plan
    added = parts.pools[UNITS].extra_nbytes
    on_host = plan.device.type == "cpu"
    # Ranks of a node that compute in its memory measure it before any of them adds to it.
    free = parts.device.available_bytes() // (engine.ranks.local_size if on_host else 1)
    yield max(0, free), f"{'host' if on_host else 'device'} memory for the parameters of GatheredParameters"
    if plan.device.limit:
        left = plan.device.limit - plan.peak_nbytes()[TierKind.DEVICE] - added
        yield max(0, left), "device memory (infinity.memory.device) for the parameters of GatheredParameters"
    if on_host and plan.budget.host is not None and engine.config.infinity.memory.host != "auto":
        left = plan.budget.host - plan.peak_of_host() - added
        yield max(0, left), "host memory (infinity.memory.host) for the parameters of GatheredParameters"


def get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Return the master, or a frozen parameter's value: fp32 in the parameter's shape, in host memory."""
    engine, unit, slot = _owner(param)
    _begin(engine, unit, slot, "master")
    values = _read(engine, unit).value(slot).float().clone()
    return engine.ranks.model.whole(param, values)


def set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master to `value`, in the parameter's shape. A 16-bit parameter is set to `value` rounded."""
    engine, unit, slot = _owner(param)
    _check(value, param, unit, slot)
    _begin(engine, unit, slot, "master", Operation.WRITE_STATE)
    states = _read(engine, unit)
    states.value(slot).copy_(engine.ranks.model.part(param, value))
    states.write()


def get_full_optimizer_state(param: nn.Parameter, name: str) -> torch.Tensor:
    """Return a moment of the optimizer: fp32 in the parameter's shape, in host memory.

    name: `exp_avg`, `exp_avg_sq`, `sum` or `momentum_buffer`, depending on the rule. Of a rule in Python: any of its
    states, in their own shape and dtype. Raises UsageError for others.
    """
    engine, unit, slot = _owner(param)
    _check_moment(engine, unit, slot, name)
    _begin(engine, unit, slot, name)
    if unit.layout.slots[slot].record is not None:
        return _own_state(_read(engine, unit), unit, slot, name).clone()
    return engine.ranks.model.whole(
        param, fp32_moment(engine.config.optimizer.rule, name, _read(engine, unit).of_slot(slot))
    )


def set_full_optimizer_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Set a moment to `value`, in the parameter's shape. Moments in bf16 or 8bit are rounded as in an update."""
    engine, unit, slot = _owner(param)
    _check_moment(engine, unit, slot, name)
    own = unit.layout.slots[slot].record
    if own is None:
        _check(value, param, unit, slot)
    _begin(engine, unit, slot, name, Operation.WRITE_STATE)
    states = _read(engine, unit)
    if own is not None:
        place = _own_state(states, unit, slot, name)
        if not isinstance(value, torch.Tensor) or value.shape != place.shape:
            raise UsageError(
                f"{name} of {unit.layout.slots[slot].name} has shape {list(place.shape)}: pass such a tensor"
            )
        place.copy_(value)
        states.write()
        return
    rule, layout = engine.config.optimizer.rule, unit.layout
    key, first = rounding_key(engine.config.infinity.seed, unit.steps[slot]), layout.first + layout.slots[slot].offset
    moment = {name: engine.ranks.model.part(param, value.detach().cpu().float())}
    convert_moment(rule, name, moment, states.of_slot(slot), key=key, first=first)
    states.write()


def get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of the present step: fp32 in the parameter's shape, in host memory; None if it has none.

    It is the mean over ranks (the sum, if `gradient_allreduce_op` says so) and micro-batches, without the loss scale,
    before clipping. Call it between the last `backward` of a step and `step`. Raises UsageError if the update has
    consumed it; set infinity.update to "next_forward" or "after_backward" then.
    """
    _begin(*_owner(param), "gradient")
    owner = _with_grad(param)
    if owner is None:
        return None
    engine, unit, slot = owner
    _, values, factor = _gradient(engine, unit, slot)
    return engine.ranks.model.whole(param, values.float() / factor)


def set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient by `value`, in the parameter's shape; see `get_full_grad`.

    Raises UsageError if the parameter has no gradient in this step.
    """
    engine, unit, slot = _owner(param)
    _check(value, param, unit, slot)
    _begin(engine, unit, slot, "gradient", Operation.WRITE_STATE)
    owner = _with_grad(param)
    if owner is None:
        name = unit.layout.slots[slot].name
        raise UsageError(f"{name} has no gradient in this step: call set_full_grad between backward and step")
    trainer = owner[0]
    trainer.updates.runner.withdraw(unit)  # its draft used the gradient of before
    flat, values, factor = _gradient(trainer, unit, slot)
    values.copy_(trainer.ranks.model.part(param, value) * factor)
    trainer.updates.gradients.write(unit, flat)


def _gradient(engine: TrainingEngine, unit: Unit, slot: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return a unit's stored gradient, the view of a parameter's, and the factor by which it exceeds the mean."""
    flat, place = engine.updates.gradients.read(unit), unit.layout.slots[slot]
    factor = engine.parts.plan.grad_divisor * engine.loss_scale.value
    return flat, flat[place.offset : place.stop].view(place.shape), factor


def _begin(engine: BaseEngine, unit: Unit, slot: int, state: str, operation: Operation = Operation.READ_STATE) -> None:
    """Wait until all ranks have begun this call for the same state."""
    engine.ranks.begin(Announcement.of_state(operation, unit.index, slot, state))


class _States:
    """States of one unit, unsharded on every rank, by kind and slot."""

    def __init__(self, engine: BaseEngine, unit: Unit) -> None:
        self._engine, self._unit = engine, unit
        self._flats: Flats = engine.parts.states.read(unit.layout)

    def value(self, slot: int) -> torch.Tensor:
        """Return the most precise value of a parameter: the master, or that of a frozen one."""
        return next(iter(self.of_slot(slot).values()))

    def of_slot(self, slot: int) -> dict[str, torch.Tensor]:
        """Return one parameter's states by name."""
        layout, updates = self._unit.layout, self._unit.steps[slot]
        return self._engine.parts.states.of_slot(layout, self._flats, slot, updates)

    def write(self) -> None:
        """Write this rank's shard to its tiers."""
        self._unit.snapshot_read.wait()
        self._engine.parts.states.write(self._unit.layout, self._flats, edits=True)
        self._unit.rewritten()
        self._engine.parts.runner.refresh_viewed()


def _read(engine: BaseEngine, unit: Unit) -> _States:
    engine.settle()
    return _States(engine, unit)


def _start_updates(engine: BaseEngine) -> None:
    """Start the updates that a durable run's last commit waits for, since edits are written after that commit."""
    if isinstance(engine, TrainingEngine) and engine.updates.durable is not None:
        engine.updates.runner.start_due_updates()


def _stored(params: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters, with the inner tensors of wrappers in their place."""
    for param in params:
        yield from (each.tensor for each in stored(param)) if isinstance(param, nn.Parameter) else [param]


def _find(param: Any) -> tuple[BaseEngine, Unit, int] | None:
    """Return the open engine, unit and slot of a parameter; None if no engine is open for it."""
    for engine in list(open_engines):
        unit = engine.parts.unit_of.get(id(param))
        if unit is not None:
            slot = next(number for number, held in enumerate(unit.parameters) if held is param)
            return engine, unit, slot
    return None


def _owner(param: Any) -> tuple[BaseEngine, Unit, int]:
    owner = _find(param)
    if owner is None and isinstance(param, torch.Tensor) and is_wrapper(param):
        raise UsageError(
            f"param is a {type(param).__name__}, which an engine stores by its inner tensors: read and edit it in "
            "infinity.GatheredParameters([param])"
        )
    if owner is None:
        raise UsageError("param is no parameter of an open engine: pass one of its model, such as model.head.weight")
    return owner


def _check(value: torch.Tensor, param: nn.Parameter, unit: Unit, slot: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"the value for {unit.layout.slots[slot].name} is a {type(value).__name__}: pass a tensor of shape "
            f"{list(param.shape)}"
        )
    if value.shape != param.shape:
        name, shapes = unit.layout.slots[slot].name, f"{list(param.shape)}, the value {list(value.shape)}"
        raise UsageError(f"{name} has shape {shapes}: pass a value of the parameter's shape")


def _check_moment(engine: BaseEngine, unit: Unit, slot: int, name: str) -> None:
    names = RULES[engine.config.optimizer.rule].moments
    if (record := unit.layout.slots[slot].record) is not None:
        names = tuple(field.name for field in record.after[-1].fields)
    if not unit.layout.trainable or name not in names:
        reason = f"the optimizer keeps {', '.join(names)}" if unit.layout.trainable else "the parameter is frozen"
        raise UsageError(f"there is no state {name!r}: {reason}")


def _own_state(states: _States, unit: Unit, slot: int, name: str) -> torch.Tensor:
    """Return a view of a state of a rule in Python. Raises UsageError before the parameter's first update."""
    found = states.of_slot(slot).get(name)
    if found is None:
        raise UsageError(
            f"{unit.layout.slots[slot].name} has no {name} yet: its optimizer makes it in its first update"
        )
    return found


def _with_grad(param: Any) -> tuple[TrainingEngine, Unit, int] | None:
    """Return `_owner` of a parameter that has a gradient in this step; None if it has none."""
    engine, unit, slot = _owner(param)
    if not isinstance(engine, TrainingEngine):
        return None
    collector, gradients = engine.updates.collector, engine.updates.gradients
    if unit.index in collector.collecting:
        raise UsageError(
            "gradients are complete after a step's last micro-batch: call engine.backward for it first. Without "
            "managed_gradient_accumulation stages 2 and 3 have complete gradients, and stages 0 and 1 reduce them in "
            "engine.step()"
        )
    if unit.index in gradients.units:
        gradients.settle()
        return (engine, unit, slot) if slot in gradients.slots[unit.index] else None
    if unit.index in engine.parts.schedule.step.updated:
        raise UsageError(
            f"the gradient of unit {unit.name} is gone, since the unit was updated during backward: set "
            'infinity.update to "next_forward" or "after_backward"'
        )
    return None
