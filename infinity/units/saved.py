"""Autograd saves a reference, not bytes.

PyTorch's saved-tensor hooks replace every tensor that autograd saves out of a unit's buffer by (unit, offset, size,
stride, version), views such as `weight.t()` included, and give back a view on the buffer the unit is in when backward
asks, fetching it if need be. So buffers are reused freely between forward and backward.

The hooks are installed while an engine is open, in the thread that opened it; autograd's own threads inherit them.
They switch off PyTorch's check for in-place edits, so they make it themselves, for all tensors.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infinity.errors import LifetimeError
from infinity.units.local import has_storage, local, of_spec, spec_of
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.units.store import UnitStore


class _Reference:
    """A tensor that autograd saved out of a unit's buffer. The unit counts those that are alive."""

    __slots__ = ("dtype", "generation", "offset", "size", "slot", "spec", "store", "stride", "token", "unit", "version")

    def __init__(self, saved: torch.Tensor, unit: Unit, store: UnitStore) -> None:
        tensor = local(saved)
        start = tensor.storage_offset() * tensor.element_size() // unit.layout.dtype.itemsize
        self.unit = unit
        self.store = store
        self.generation = unit.generation
        self.slot = unit.layout.slot_at(start)
        self.version = unit.parameters[self.slot]._version
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.token = unit.token
        self.spec = spec_of(saved)


class _Kept(NamedTuple):
    tensor: torch.Tensor
    version: int


# Weak, so that an engine that is dropped without being closed can end.
_resident: dict[int, tuple[weakref.ref[Unit], weakref.ref[UnitStore]]] = {}
_open_engines = 0


def register(unit: Unit, store: UnitStore) -> None:
    """`unit`'s buffer holds its parameters from now on."""
    assert unit.lease is not None
    _resident[unit.lease.address] = (weakref.ref(unit), weakref.ref(store))


def unregister(unit: Unit) -> None:
    assert unit.lease is not None
    _resident.pop(unit.lease.address, None)


def unit_behind(tensor: torch.Tensor) -> Unit | None:
    """The resident unit whose buffer `tensor` is a view of."""
    found = _behind(tensor)
    return found[0] if found else None


def _behind(tensor: torch.Tensor) -> tuple[Unit, UnitStore] | None:
    values = local(tensor)
    found = _resident.get(values.untyped_storage().data_ptr()) if has_storage(values) else None
    if found is None:
        return None
    unit, store = found[0](), found[1]()
    return None if unit is None or store is None else (unit, store)


def _pack(tensor: torch.Tensor) -> Any:
    if tensor.is_inference():
        return tensor
    found = _behind(tensor)
    if found is None:
        # Detached: an output saved by the node that made it would keep that node alive for ever.
        return _Kept(tensor.detach(), tensor._version)
    return _Reference(tensor, *found)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, _Kept):
        if packed.tensor._version != packed.version:
            raise LifetimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "tensor of shape "
                f"{list(packed.tensor.shape)} is at version {packed.tensor._version}, but version {packed.version} "
                "was saved. "
                "Do the edit out of place, or after backward."
            )
        return packed.tensor
    if isinstance(packed, torch.Tensor):
        return packed
    reference: _Reference = packed
    unit = reference.unit
    if unit.generation != reference.generation:
        raise LifetimeError(
            f"backward needs the parameters of unit {unit.name} as they were before they were updated. Set "
            "infinity.update to "
            '"next_forward", or finish every backward of a step before engine.step().'
        )
    reference.store.use(unit)
    parameter = unit.parameters[reference.slot]
    if parameter._version != reference.version:
        raise LifetimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: parameter "
            f"{unit.layout.slots[reference.slot].name} is at version {parameter._version}, but version "
            f"{reference.version} was saved. "
            "Edit parameters after backward, under torch.no_grad()."
        )
    assert unit.lease is not None
    whole = unit.lease.flat(unit.layout.dtype)
    if reference.dtype != unit.layout.dtype:
        whole = whole.view(reference.dtype)
    return of_spec(whole.as_strided(reference.size, reference.stride, reference.offset), reference.spec)


def install() -> None:
    """Called once per engine that opens."""
    global _open_engines
    if _open_engines == 0:
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
    _open_engines += 1


def uninstall() -> None:
    """Called once per engine that closes."""
    global _open_engines
    _open_engines -= 1
    if _open_engines == 0:
        torch._C._autograd._pop_saved_tensors_default_hooks()
