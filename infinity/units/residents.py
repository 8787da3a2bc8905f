"""Registry of managed parameters and resident buffers: finds the unit behind a tensor, and who fetches it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from infinity.comm.dtensor import has_storage, local, unwrapped
from infinity.units.stored import inner, is_wrapper

if TYPE_CHECKING:
    from infinity.observe.recorder import Recorder
    from infinity.schedule.schedule import Schedule
    from infinity.units.unit import Unit


class CodeScope(Protocol):
    """Scope in which the model's code runs (`infinity.model.saved`)."""

    depth: int

    def enter(self, on_first: Callable[[], None] | None = None) -> bool: ...
    def leave(self, installed: bool) -> None: ...


class Fetcher(Protocol):
    """Fetches units and holds them (`infinity.engine.runner`)."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def scope(self) -> CodeScope: ...
    @property
    def schedule(self) -> Schedule: ...
    def use(self, unit: Unit) -> None: ...
    def hold(self, unit: Unit) -> None: ...
    def unhold(self, unit: Unit) -> None: ...
    def await_committed_write(self, unit: Unit) -> None: ...
    def check_edit_in_backward(self, name: str) -> None: ...


class Owner(NamedTuple):
    """The unit and slot that a parameter belongs to, and the object that fetches it."""

    unit: Unit
    fetcher: Fetcher
    slot: int


# Weak references: an engine that is dropped without `close` can be freed.
_References = tuple["weakref.ref[Unit]", "weakref.ref[Fetcher]"]
_buffers: dict[int, _References] = {}
_parameters: dict[int, tuple[weakref.ref[Unit], weakref.ref[Fetcher], int]] = {}


def add_parameters(unit: Unit, fetcher: Fetcher) -> None:
    """Register `unit` as the owner of its parameters."""
    references = weakref.ref(unit), weakref.ref(fetcher)
    unit.register(references)
    for slot, parameter in enumerate(unit.parameters):
        _parameters[id(parameter)] = (*references, slot)


def remove_parameters(unit: Unit) -> None:
    for parameter in unit.parameters:
        _parameters.pop(id(parameter), None)


def owner_of(parameter: object) -> Owner | None:
    """Return the owner of a managed parameter; None for any other object."""
    found = _parameters.get(id(parameter))
    if found is None:
        return None
    unit, fetcher, slot = found[0](), found[1](), found[2]
    if unit is None or fetcher is None or unit.parameters[slot] is not parameter:
        return None  # the engine was dropped, and `id` may belong to another object
    return Owner(unit, fetcher, slot)


def owners_of(tensor: torch.Tensor) -> list[Owner]:
    """Return the owner of a managed parameter, or those of a wrapper's inner tensors; empty for any other tensor."""
    owner = owner_of(tensor)
    if owner is not None:
        return [owner]
    if not is_wrapper(tensor):
        return []
    return [owner for _, each in inner(tensor) if (owner := owner_of(each)) is not None]


def add_buffer(unit: Unit) -> None:
    """Register the leased buffer of `unit` as the memory of its parameters."""
    assert unit.lease is not None and unit.owner is not None
    # The unit's own references: a backward after `close` still fetches, and its parameters are registered no more.
    _buffers[unit.lease.storage] = unit.owner


def remove_buffer(unit: Unit) -> None:
    assert unit.lease is not None
    _buffers.pop(unit.lease.storage, None)


def behind(tensor: torch.Tensor) -> tuple[Unit, Fetcher] | None:
    """Return the resident unit whose buffer `tensor` views, and what fetches it; None if there is none."""
    values = unwrapped(local(tensor))
    found = _buffers.get(values.untyped_storage()._cdata) if has_storage(values) else None
    if found is None:
        return None
    unit, fetcher = found[0](), found[1]()
    return None if unit is None or fetcher is None else (unit, fetcher)


def clear() -> list[Unit]:
    """Drop all registrations. Returns the units that were resident."""
    units = [unit for references in _buffers.values() if (unit := references[0]()) is not None]
    _buffers.clear()
    _parameters.clear()
    return units
