"""Autograd saves a reference, not bytes.

PyTorch's saved-tensor hooks replace every tensor that autograd saves out of a unit's buffer by (unit, offset, size,
stride, version), views such as `weight.t()` included, and give back a view on the buffer the unit is in when backward
asks, fetching it if need be. So buffers are reused freely between forward and backward.

The hooks follow the forward: they are installed while a module of the model runs, in whatever thread that is, on top of
hooks of the user's (non-reentrant checkpoints, `save_on_cpu`), which get everything but the unit's parameters. They
switch off PyTorch's check for in-place edits, so they make it themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from infinity.errors import LifetimeError
from infinity.units import residents
from infinity.units.compiled import eager
from infinity.units.local import is_distributed, is_plain, local, of_spec, spec_of
from infinity.units.modes import outside_modes
from infinity.units.released import own_type, version_of
from infinity.units.residents import Owner
from infinity.units.unit import placeholder

if TYPE_CHECKING:
    from infinity.units.store import UnitStore
    from infinity.units.unit import Unit

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]
_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_STANDS_FOR = "_infinity_stands_for"
"""Attribute of a stand-in for a tensor that is in a unit."""


def _is_checkpointing(hooks: tuple[_Pack, _Unpack] | None) -> bool:
    """Whether these are hooks of a non-reentrant checkpoint, which computes anew what it is given."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__


class _Reference:
    """A tensor that autograd saved out of a unit's buffer. The unit counts those that are alive."""

    __slots__ = (
        "assigned",
        "conj",
        "dtype",
        "generation",
        "kind",
        "neg",
        "offset",
        "size",
        "slot",
        "spec",
        "store",
        "stride",
        "token",
        "unit",
        "version",
    )

    assigned: int | None
    """How often data had been assigned to the parameter. None: it was saved itself, and shows data that is assigned
    later.
    """
    kind: type | None
    """The user's own subclass of Parameter, if it is of one."""

    def __init__(self, saved: torch.Tensor, unit: Unit, store: UnitStore) -> None:
        tensor = local(saved)
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        # Lazy bits of the view, which are no part of the memory.
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.spec = spec_of(saved)
        self.kind = None
        self.slot = unit.layout.slot_at(self.offset * tensor.element_size() // unit.layout.dtype.itemsize)
        self._of(unit, store, version_of(unit.parameters[self.slot]))
        self.assigned = unit.assignments[self.slot]

    @classmethod
    def to_parameter(cls, parameter: torch.Tensor, owner: Owner) -> _Reference:
        """A reference to a parameter itself, whatever its type and wherever its unit and its data are."""
        unit, store, slot = owner
        made = cls.__new__(cls)
        place = unit.layout.slots[slot]
        made.dtype, made.offset, made.size = unit.layout.dtype, place.offset, torch.Size(place.shape)
        made.stride = unit.strides[slot]
        made.conj = made.neg = False
        made.slot = slot
        made.spec = spec_of(parameter)
        kind = own_type(parameter)
        made.kind = None if kind is nn.Parameter or made.spec is not None else kind
        made._of(unit, store, version_of(unit.parameters[slot]))
        return made

    def _of(self, unit: Unit, store: UnitStore, version: int | None) -> None:
        self.unit = unit
        self.store = store
        self.generation = unit.generation
        self.assigned = None
        self.version = version
        """None: an edit since then is right."""
        self.token = unit.token

    def view(self) -> torch.Tensor:
        """The tensor on the buffer that the unit is in now."""
        unit = self.unit
        if unit.generation != self.generation:
            raise LifetimeError(
                f"backward needs the parameters of unit {unit.name} as they were before they were updated. Set "
                'infinity.update to "next_forward", or finish every backward of a step before engine.step().'
            )
        self.store.use(unit)
        parameter = unit.parameters[self.slot]
        if self.version is not None and (version := version_of(parameter)) != self.version:
            raise LifetimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {unit.layout.slots[self.slot].name} is at version {version}, but version "
                f"{self.version} was saved. Edit parameters after backward, under torch.no_grad()."
            )
        if self.assigned is None:
            if unit.assigned(self.slot) != unit.assignments[self.slot]:
                unit.adopt_assigned()
        elif unit.assigned(self.slot) != self.assigned:
            raise LifetimeError(
                f"{unit.layout.slots[self.slot].name}.data was assigned between forward and backward, which needs the "
                "values of before: assign before forward or after backward."
            )
        assert unit.lease is not None
        with outside_modes():
            whole = unit.lease.flat(unit.layout.dtype)
            if self.dtype != unit.layout.dtype:
                whole = whole.view(self.dtype)
            found = whole.as_strided(self.size, self.stride, self.offset)
            if self.conj:
                found = found.conj()
            if self.neg:
                found = torch._neg_view(found)
            if self.kind is not None:
                found = found.as_subclass(self.kind)
                found.__dict__.update(parameter.__dict__)
            return of_spec(found, self.spec)


class _Kept(NamedTuple):
    """A tensor that is in no unit's buffer, and its version."""

    tensor: torch.Tensor
    version: int

    def check(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise LifetimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}, but version "
                f"{self.version} was saved. Do the edit out of place, or after backward."
            )
        return self.tensor


class _Passed(NamedTuple):
    """What the user's hooks made of a tensor, and the one that undoes it. token: of the unit that it is in, if any."""

    unpack: _Unpack
    packed: Any
    token: object = None

    def restore(self) -> torch.Tensor | _Reference:
        """The tensor, or what a stand-in for it refers to."""
        tensor = self.unpack(self.packed)
        reference: _Reference | None = getattr(tensor, _STANDS_FOR, None)
        return tensor if reference is None else reference


class SavedTensors:
    """The saved-tensor hooks of one engine. on_unpack: called whenever autograd asks for a tensor saved under them."""

    def __init__(self, on_unpack: Callable[[], None]) -> None:
        self._on_unpack = on_unpack
        self._unpack_hook = self._unpack
        """One object, by which the hooks are recognised."""

    def notice(self) -> None:
        """Something of the model happens, in a backward or not."""
        self._on_unpack()

    def install(self, *, over_others: bool = True) -> bool:
        """Make these the hooks of this thread. False, where they are already, or torch.func forbids hooks, or there are
        the user's and they are not to go over them: nothing is to be undone then.
        """
        top = _top(True)
        if not _are_allowed() or (top is not None and (top[1] is self._unpack_hook or not over_others)):
            return False
        if top is None:
            _push(_pack, self._unpack_hook)
        else:
            _push(_packing_over(*top), self._unpack_hook)
        return True

    def are_covered(self) -> bool:
        """Whether hooks of the user's are installed over these, and may keep what they are given. Those of checkpoints
        do not: it is computed anew.
        """
        top = _top(True)
        return top is not None and top[1] is not self._unpack_hook and not _is_checkpointing(top)

    def uninstall(self) -> None:
        """Undo an `install` that returned True, in the same thread."""
        _pop()

    @eager
    def _unpack(self, packed: Any) -> torch.Tensor:
        self._on_unpack()
        if isinstance(packed, _Passed):
            packed = packed.restore()
        if isinstance(packed, _Reference):
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward and torch.is_grad_enabled() and not _is_checkpointing(_top(True)):
                # A graph of this backward is being recorded. autograd restores the thread's hooks after each node.
                # A checkpoint is to see the same in forward, where hooks are there, and as it computes again.
                self.install()
            return packed.view()
        if isinstance(packed, _Kept):
            return packed.check()
        tensor: torch.Tensor = packed
        return tensor


def _reference(tensor: torch.Tensor) -> _Reference | None:
    """A reference that restores `tensor` faithfully; None where there is none."""
    owner = residents.owner_of(tensor)
    if owner is not None:
        return _Reference.to_parameter(tensor, owner)
    if not (is_plain(tensor) or is_distributed(tensor)):
        return None  # a subclass may carry more than its memory
    found = residents.behind(tensor)
    return None if found is None else _Reference(tensor, *found)


@eager
def _pack(tensor: torch.Tensor) -> Any:
    with outside_modes():
        reference = _reference(tensor)
        if reference is not None:
            return reference
        if tensor.is_inference():
            return tensor
        # Detached: an output saved by the node that made it would keep that node alive for ever. A leaf stays itself,
        # as in PyTorch: a subclass may have attributes.
        return _Kept(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def _is_lossless(pack: _Pack, unpack: _Unpack, tensor: torch.Tensor) -> bool:
    """Whether the user's hooks give `tensor` back as it is."""
    if getattr(pack, "__module__", None) == torch.autograd.graph.__name__:  # save_on_cpu
        return True
    restored = unpack(pack(tensor))
    if restored is tensor:
        return True
    with torch.no_grad(), outside_modes():
        return restored.dtype == tensor.dtype and torch.equal(restored, tensor.detach())


def _packing_over(pack: _Pack, unpack: _Unpack) -> _Pack:
    """As `_pack`, where the user's hooks get what is in no unit.

    A checkpoint, which compares what is saved in forward and as it computes again, gets a stand-in of the same shape
    for what is in a unit. Backward is given what the recomputation saved, as in PyTorch, after any edit. Hooks that
    round get everything.
    """
    recomputed = _is_checkpointing((pack, unpack))

    @eager
    def over(tensor: torch.Tensor) -> Any:
        with outside_modes():
            reference = _reference(tensor)
        if reference is None:
            return _Passed(unpack, pack(tensor))
        if not recomputed:
            return reference if _is_lossless(pack, unpack, tensor) else _Passed(unpack, pack(tensor), reference.token)
        reference.version = None
        with outside_modes():
            stand_in = placeholder(tuple(tensor.shape), tensor.dtype, tensor.device).detach()
        setattr(stand_in, _STANDS_FOR, reference)
        return _Passed(unpack, pack(stand_in), reference.token)

    return over
