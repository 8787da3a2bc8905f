"""Binds parameters to memory: views of a unit's buffer, or placeholders. Adopts data that users assigned to `.data`."""

from __future__ import annotations

import os

import torch

from infinity.comm.dtensor import local, set_local
from infinity.errors import UsageError
from infinity.observe.recorder import Recorder
from infinity.units import released, residents
from infinity.units.compiled import outside_modes
from infinity.units.unit import Unit, placeholder


def bind(unit: Unit) -> None:
    """Make the parameters views of the leased buffer, with their own types."""
    assert unit.lease is not None
    released.restore(unit)
    for parameter, place in zip(unit.parameters, unit.places, strict=True):
        set_local(parameter, unit.lease.part(unit.layout.dtype, place))
    # The addresses show later whether `.data` was assigned (`adopt_assigned`).
    start = unit.flat().data_ptr()
    unit.bind(
        [
            (0 if at is None else start + at, shape, stride)
            for at, (shape, stride, _) in zip(unit.addresses, unit.places, strict=True)
        ]
    )


def unbind(unit: Unit) -> None:
    """Make the parameters placeholders, whose type fetches the unit when they are used."""
    released.restore(unit)
    for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
        set_local(parameter, placeholder(slot.shape, unit.layout.dtype, unit.device))
    unit.bind([])
    released.release(unit)


def adopt_assigned(unit: Unit, recorder: Recorder) -> None:
    """Copy data that a user assigned (`parameter.data = …`) into the buffer, and make the parameter view it again.

    Drops the data and raises LifetimeError if its shape differs, or UsageError if its dtype differs, which the
    parameter would have in a plain loop, or if other tensors view the buffer, which would keep the previous values.
    """
    with torch._C.DisableTorchFunctionSubclass():
        present = [(p.data_ptr(), p.shape, p.stride()) for p in map(local, unit.parameters)]
    if present == unit.views:
        return
    assert unit.lease is not None
    with outside_modes():
        if unit.update is not None:
            with recorder.wait("update", "update"):
                unit.update.done.wait()  # a write under way also refers to the buffer
        # Each parameter that still views the buffer is one expected reference; one that was assigned is none.
        unchanged = sum(now == bound for now, bound in zip(present, unit.views, strict=True))
        viewed = unit.lease.is_referenced(beyond=unchanged)
        flat, guarded = unit.flat(), released.is_released(unit.parameters[0])
        released.restore(unit)
        try:
            for number in (n for n, view in enumerate(unit.views) if present[n] != view):
                _adopt(unit, number, flat, viewed=viewed)
        finally:
            if guarded:
                released.release(unit)


def _adopt(unit: Unit, number: int, flat: torch.Tensor, *, viewed: bool) -> None:
    parameter, slot = unit.parameters[number], unit.layout.slots[number]
    # The parameter gets its view first, so that it is whole whichever check raises.
    view, assigned = flat.as_strided(*unit.places[number]), local(parameter).data
    set_local(parameter, view)
    if assigned.shape != view.shape:
        raise released.wrong_shape(slot.name, assigned.shape, view.shape)
    if assigned.dtype != view.dtype:
        raise UsageError(
            f"{slot.name}.data was assigned a tensor in {assigned.dtype}, and the engine keeps the parameter in "
            f"{view.dtype}. The data was dropped. Assign it in the parameter's dtype: value.to({slot.name}.dtype)."
        )
    released.refuse_shared(unit, number, assigned)
    if viewed:
        raise UsageError(
            f"{slot.name}.data was assigned while something refers to parameters of unit {unit.name}: a view, a "
            "detached tensor or an array, which would no longer follow them. The data was dropped. "
            f"Change the values in place ({slot.name}.data.copy_(…)), or keep the parameter."
        )
    unit.assignments[number] += 1
    view.copy_(assigned.clone())  # clone: it may view the same memory


def assigned(unit: Unit, slot: int) -> int:
    """Return the number of `.data` assignments to the parameter of a resident unit, including a pending one.

    Several assignments without an adoption in between count as one.
    """
    # The type that fetches the unit would be asked for the address, and fetch.
    with torch._C.DisableTorchFunctionSubclass():
        pending = local(unit.parameters[slot]).data_ptr() != unit.views[slot][0]
    return unit.assignments[slot] + pending


def is_whole(unit: Unit, tensor: torch.Tensor) -> bool:
    """Return True if `tensor` shows a whole parameter of the resident unit, as `.data` and `.detach()` do."""
    values = local(tensor)
    return (values.data_ptr(), values.shape, values.stride()) in unit.views


class ResidentUnits:
    """The units of one engine whose parameters view their buffer.

    While the model's code runs (`open`), their parameters have their own types. Otherwise they have the type that
    fetches their unit for each operation (`infinity.units.released`).
    """

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self._open = False

    def add(self, unit: Unit) -> None:
        self._units[unit.index] = unit
        # Outside of the model's code every use has to fetch, since the unit may be evicted in between.
        if not self._open:
            released.release(unit)

    def remove(self, unit: Unit) -> None:
        self._units.pop(unit.index, None)

    def open(self) -> None:
        self._open = True
        for unit in self._units.values():
            released.restore(unit)

    def close(self) -> None:
        self._open = False
        for unit in self._units.values():
            released.release(unit)


def _leave_to_parent() -> None:
    """Drop all registrations in a forked child. Buffers are MADV_DONTFORK, so any use would raise SIGSEGV."""
    for unit in residents.clear():
        unbind(unit)


os.register_at_fork(after_in_child=_leave_to_parent)
