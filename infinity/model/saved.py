"""Saved-tensor hooks: autograd saves references into units, not bytes.

PyTorch's saved-tensor hooks replace every tensor that autograd saves from a unit's buffer, views such as `weight.t()`
included, by (unit, offset, size, stride, version). When backward unpacks it, they fetch the unit if necessary and
return a view of its present buffer. So buffers can be reused between forward and backward.

The hooks are installed while a module of the model runs, in its thread, on top of the user's hooks (non-reentrant
checkpoints, `save_on_cpu`), which get all tensors outside of units. Hooks that a forward opens go below them, too.
Hooks disable PyTorch's check for in-place edits, so these repeat it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from infinity.activations.room import Alias
from infinity.activations.store import ActivationStore, SavedActivation
from infinity.comm.dtensor import is_distributed, is_plain, local, of_spec, spec_of
from infinity.errors import LifetimeError, UsageError
from infinity.model.backward import BackwardTracker, works_for
from infinity.units import binding, residents
from infinity.units.compiled import eager, outside_modes
from infinity.units.released import own_type, version_of
from infinity.units.residents import Fetcher, Owner
from infinity.units.stored import Shell, inner, is_wrapper
from infinity.units.unit import placeholder

if TYPE_CHECKING:
    from infinity.units.unit import Unit

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]
topmost_hooks: Callable[[bool], tuple[_Pack, _Unpack] | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the topmost hooks of this thread, or None. Argument: True returns them while Dynamo traces, too."""
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_STANDS_FOR = "_infinity_stands_for"
"""Attribute of a stand-in for a tensor in a unit; its value is the `_Reference`."""


def _is_checkpointing(hooks: tuple[_Pack, _Unpack] | None) -> bool:
    """Return whether these are hooks of a non-reentrant checkpoint, which recomputes its tensors."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__


class _Reference:
    """Reference to a tensor in a unit's buffer that autograd saved. The unit counts live references.

    A graph holds many of them, so it is one object, which the garbage collector visits once.
    """

    __slots__ = (
        *("assigned", "conj", "dtype", "fetcher", "generation", "kind", "neg", "offset"),
        *("size", "slot", "spec", "stride", "token", "unit", "version"),
    )

    def __init__(
        self,
        saved: torch.Tensor,
        owner: tuple[Unit, Fetcher, int],
        place: tuple[torch.dtype, Sequence[int], Sequence[int], int, bool, bool],
        kind: type | None,
        assigned: int | None,
    ) -> None:
        """owner: unit, what fetches it, and slot of the parameter that `saved` is, or views. place: dtype, size, stride
        and offset in the buffer, in elements of the dtype, and the lazy bits of the view, which its memory does not
        contain (conj, neg). kind: the user's own subclass of Parameter; None for nn.Parameter. assigned: count of
        `.data` assignments to the parameter; None: `saved` is the parameter, and data assigned later is used.
        """
        self.unit, self.fetcher, self.slot = unit, _, slot = owner
        self.dtype, self.size, self.stride, self.offset, self.conj, self.neg = place
        self.spec = spec_of(saved)
        self.kind = None if self.spec is not None else kind
        self.generation = unit.generation
        self.assigned = assigned
        self.version: int | None = version_of(unit.parameters[slot])
        """Version of the parameter when it was saved; None: backward may use values edited later."""
        self.token = unit.token

    @classmethod
    def to_view(cls, saved: torch.Tensor, unit: Unit, fetcher: Fetcher) -> _Reference:
        """Return a reference to a tensor that views a unit's buffer."""
        tensor = local(saved)
        dtype, offset = tensor.dtype, int(tensor.storage_offset())
        slot = unit.layout.slot_at(offset * dtype.itemsize // unit.layout.dtype.itemsize)
        place = dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()
        return cls(saved, (unit, fetcher, slot), place, None, unit.assignments[slot])

    @classmethod
    def to_parameter(cls, parameter: torch.Tensor, owner: Owner) -> _Reference:
        """Return a reference to a parameter itself, for any type and any residency of its unit."""
        kind = own_type(parameter)
        place = owner.unit.layout.dtype, *owner.unit.places[owner.slot], False, False
        return cls(parameter, owner, place, None if kind in (nn.Parameter, torch.Tensor) else kind, None)

    def allow_edits(self) -> None:
        """Let backward use values of the parameter that are edited later."""
        self.version = None

    def view(self) -> torch.Tensor:
        """Fetch the unit and return the tensor as a view of its present buffer. Raises LifetimeError if it changed."""
        unit, slot = self.unit, self.slot
        # An update or a load has overwritten the values, which no fetch can bring back.
        if unit.generation != self.generation:
            raise LifetimeError(
                f"backward needs the parameters of unit {unit.name} as they were before they were updated. Set "
                'infinity.update to "next_forward", or finish every backward of a step before engine.step().'
            )
        self.fetcher.use(unit)
        parameter = unit.parameters[slot]
        # PyTorch's own check is off under saved-tensor hooks [Note: saved references].
        if self.version is not None and (version := version_of(parameter)) != self.version:
            raise LifetimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {unit.layout.slots[slot].name} is at version {version}, but version "
                f"{self.version} was saved. Edit parameters after backward, under torch.no_grad()."
            )
        assigned = binding.assigned(unit, slot)
        if self.assigned is not None and assigned != self.assigned:
            raise LifetimeError(
                f"{unit.layout.slots[slot].name}.data was assigned between forward and backward, which needs the "
                "values of before: assign before forward or after backward."
            )
        if assigned != unit.assignments[slot]:
            binding.adopt_assigned(unit, self.fetcher.recorder)
        assert unit.lease is not None
        with outside_modes():
            whole = unit.lease.flat(unit.layout.dtype)
            if self.dtype != unit.layout.dtype:
                whole = whole.view(self.dtype)
            found = whole.as_strided(self.size, self.stride, self.offset)
            # Lazy bits are properties of the view, which as_strided does not restore.
            if self.conj:
                found = found.conj()
            if self.neg:
                found = torch._neg_view(found)
            if self.kind is not None:
                found = found.as_subclass(self.kind)
                found.__dict__.update(parameter.__dict__)
            return of_spec(found, self.spec)


class _WrapperReference:
    """Reference to a wrapper (`infinity.units.stored`) that autograd saved, whose inner tensors lie in units.

    inner: path → reference; an `Alias` for an inner tensor outside of units.
    """

    __slots__ = ("inner", "shell")

    def __init__(self, shell: Shell, inner: dict[str, Any]) -> None:
        self.shell, self.inner = shell, inner

    @classmethod
    def of(cls, wrapper: torch.Tensor) -> _WrapperReference | None:
        """Return a reference to `wrapper`; None if no inner tensor lies in a unit."""
        tensors = dict(inner(wrapper))
        found = {path: _reference(tensor) for path, tensor in tensors.items()}
        if not any(found.values()):
            return None
        parts = {path: found[path] or _alias(tensor) for path, tensor in tensors.items()}
        return cls(Shell.of(wrapper), parts)

    @property
    def token(self) -> object:
        return [each.token for each in self._references()]

    def _references(self) -> list[_Reference]:
        return [each for each in self.inner.values() if isinstance(each, _Reference)]

    def allow_edits(self) -> None:
        for each in self._references():
            each.allow_edits()

    def view(self) -> torch.Tensor:
        """Fetch the units and return the wrapper of views of their present buffers."""
        with ExitStack() as undo:
            # Held: the fetch of a second unit must not evict the first one.
            for each in self._references():
                each.fetcher.hold(each.unit)
                undo.callback(each.fetcher.unhold, each.unit)
            values = {
                path: each.view() if isinstance(each, _Reference) else each.check() for path, each in self.inner.items()
            }
            with outside_modes():
                return self.shell.around(values)


class _Passed(NamedTuple):
    """Result of the user's pack hook, with the matching unpack hook.

    token: token of the tensor's unit, if any.
    """

    unpack: _Unpack
    packed: Any
    token: object = None

    def restore(self) -> torch.Tensor | _Reference | _WrapperReference:
        """Return the unpacked tensor, or the reference that it stands for."""
        tensor = self.unpack(self.packed)
        reference: _Reference | _WrapperReference | None = getattr(tensor, _STANDS_FOR, None)
        return tensor if reference is None else reference


class SavedTensors:
    """The saved-tensor hooks of one engine."""

    def __init__(self, backward: BackwardTracker, activations: ActivationStore | None = None) -> None:
        """activations: takes tensors outside of units; None: they stay where they are."""
        self.backward = backward
        self._activations = activations
        self._unpack_hook = self._unpack
        """The bound method as one object, since `install` compares it by identity."""
        _intercept_pushes()

    def install(self) -> bool:
        """Install the hooks in this thread. Returns True if `uninstall` must undo it.

        Returns False, and installs nothing, if these hooks are on top already, or if torch.func forbids hooks.
        """
        top = topmost_hooks(True)
        if not _are_allowed() or (top is not None and top[1] is self._unpack_hook):
            return False
        # PyTorch calls the topmost hooks alone, so those of the user are called by ours [Note: saved-tensor hooks of
        # the user].
        if top is None:
            _push(self._pack, self._unpack_hook)
        else:
            _push(_packing_over(*top), self._unpack_hook)
        return True

    def uninstall(self) -> None:
        """Undo an `install` that returned True, in the same thread."""
        _pop()

    @eager
    def _pack(self, tensor: torch.Tensor) -> Any:
        with outside_modes():
            reference = _reference(tensor)
            if reference is not None:
                return reference
            # An inference tensor has no version, by which an edit could be found.
            if tensor.is_inference():
                return tensor
            if self._activations is not None and (saved := self._activations.save(tensor)) is not None:
                return saved
            return _alias(tensor)

    @eager
    def _unpack(self, packed: Any) -> torch.Tensor:
        # The first unpack of a graph task shows that a backward runs [Note: where a backward ends].
        self.backward.notice()
        if isinstance(packed, _Passed):
            packed = packed.restore()
        if isinstance(packed, _Reference | _WrapperReference):
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward and torch.is_grad_enabled() and not _is_checkpointing(topmost_hooks(True)):
                # create_graph=True: autograd records this backward. It restores the thread's hooks after each node.
                # A checkpoint must see the same hooks in recomputation as in forward, where these are installed.
                self.install()
            return packed.view()
        if isinstance(packed, SavedActivation):
            with outside_modes():
                return packed.restore()
        if isinstance(packed, Alias):
            return packed.check()
        tensor: torch.Tensor = packed
        return tensor


@eager
def _push_below(pack_hook: _Pack, unpack_hook: _Unpack) -> None:
    """Push the user's hooks. Those that are pushed over an engine's, as by a forward of its model, go below them.

    PyTorch calls the topmost hooks alone. They would keep the parameters themselves, whose memory is reused.
    """
    top = topmost_hooks(True)
    if top is not None and getattr(top[1], "__func__", None) is SavedTensors._unpack:
        _push(_packing_over(pack_hook, unpack_hook), top[1])
    else:
        _push(pack_hook, unpack_hook)


@cache
def _intercept_pushes() -> None:
    """Make `saved_tensors_hooks`, and code that does the same without it, call `_push_below`."""
    torch._C._autograd._push_saved_tensors_default_hooks = _push_below


def _alias(tensor: torch.Tensor) -> Alias:
    # Detached: a node that saves its own output would be in a reference cycle. A leaf is kept as it is, as in PyTorch,
    # since a subclass may have attributes.
    return Alias(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def _reference(tensor: torch.Tensor) -> _Reference | _WrapperReference | None:
    """Return a reference that rebuilds `tensor`; None if it is in no unit, or of an unsupported subclass."""
    # By identity first: a parameter whose unit is released views no buffer.
    owner = residents.owner_of(tensor)
    if owner is not None:
        return _Reference.to_parameter(tensor, owner)
    if not (is_plain(tensor) or is_distributed(tensor)):
        # Another subclass may carry more than its memory.
        return _WrapperReference.of(tensor) if is_wrapper(tensor) else None
    found = residents.behind(tensor)
    return None if found is None else _Reference.to_view(tensor, *found)


def _is_lossless(pack: _Pack, unpack: _Unpack, tensor: torch.Tensor) -> bool:
    """True if the user's hooks return the values of `tensor`. Runs them on a copy, which they may keep."""
    if getattr(pack, "__module__", None) == torch.autograd.graph.__name__:  # save_on_cpu
        return True
    with torch.no_grad(), outside_modes():
        copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, tensor.requires_grad)
    restored = unpack(pack(copied))
    if restored is copied:
        return True
    with torch.no_grad(), outside_modes():
        return restored.dtype == tensor.dtype and torch.equal(restored, tensor.detach())


def _packing_over(pack: _Pack, unpack: _Unpack) -> _Pack:
    """Return a pack hook that passes tensors outside of units to the user's hooks.

    A checkpoint compares the tensors saved in forward and in recomputation, so it gets a stand-in of the same shape
    for a tensor in a unit. Backward uses the tensors of the recomputation, as in PyTorch, edits included. Hooks that
    round get every tensor.
    """
    recomputed = _is_checkpointing((pack, unpack))

    @eager
    def over(tensor: torch.Tensor) -> Any:
        with outside_modes():
            reference = _reference(tensor)
        if reference is None:
            return _Passed(unpack, pack(tensor))
        if not recomputed:
            # Quantised values are not rounded again: hooks that round are for activations.
            if isinstance(reference, _WrapperReference) or _is_lossless(pack, unpack, tensor):
                return reference
            return _Passed(unpack, pack(tensor), reference.token)
        # A checkpoint computes with the values of its second run, edits included.
        reference.allow_edits()
        with outside_modes():
            stand_in = placeholder(tuple(tensor.shape), tensor.dtype, tensor.device).detach()
        # The checkpoint keeps and returns its tensors, so the reference travels on one.
        setattr(stand_in, _STANDS_FOR, reference)
        return _Passed(unpack, pack(stand_in), reference.token)

    return over


class Scope:
    """The scope of the model's code in one engine. Any thread may enter it, one at a time. saved: the hooks in it.

    Inside, autograd saves references, and resident parameters have their own type. Outside, every parameter has the
    type that fetches its unit for each operation (`infinity.units.released`), and each such operation opens a scope. So
    autograd never saves a parameter itself, whose memory is reused.
    """

    def __init__(self, saved: SavedTensors, resident: binding.ResidentUnits) -> None:
        self.depth = 0
        """Number of scopes entered and not left; scopes nest."""
        self.saved = saved
        self._resident = resident
        self._thread = 0
        self._autocast_cache = True

    def enter(self, on_first: Callable[[], None] | None = None) -> bool:
        """Enter a scope. Returns the argument for `leave`.

        on_first: called if no scope is open, before anything is changed. Raises UsageError if another thread is inside.
        """
        thread = threading.get_ident()
        if self.depth == 0:
            if on_first is not None:
                on_first()
            self._thread = thread
            self._autocast_cache = torch.is_autocast_cache_enabled()
            self._resident.open()
        elif thread != self._thread and not works_for(self._thread):
            raise UsageError(
                "the model is running in another thread: an engine's model, backward and step run in any thread, but "
                "in one at a time. Guard them with a lock."
            )
        # In a backward: registers the task that runs a checkpoint's recomputation. The task of a backward nested in the
        # recomputation would not show where the outermost backward ends. Outside of backward: the outermost scope
        # checks for compiled autograd, which takes a few microseconds.
        if self.depth == 0 or torch._C._current_graph_task_id() != -1:
            self.saved.backward.notice()
        installed = self.saved.install()
        # Autocast caches casts of leaf parameters until its context ends: they would fill memory and be stale after an
        # update. Disabled at each entry, since a context that the model enters may enable the cache again.
        torch.set_autocast_cache_enabled(False)
        self.depth += 1
        return installed

    def leave(self, installed: bool) -> None:
        self.depth -= 1
        if installed:
            self.saved.uninstall()
        if self.depth == 0:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            self._resident.close()

    def hand_over(self) -> None:
        """Let the calling thread use an open scope in place of the one that does. That one has to wait meanwhile."""
        self._thread = threading.get_ident()
