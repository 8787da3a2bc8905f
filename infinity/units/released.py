"""Parameter objects that fetch their unit when an operation asks for their values.

Any code may keep a Parameter: a custom function (`ctx.w = w`), a list made in `__init__`, the training loop. While its
unit is released, and always outside of the model's forward, its type is a subclass whose `__torch_function__` fetches
the unit before the operation runs. So all code reads the present values. In the model's forward a resident
parameter has its own type and no overhead. Operations on metadata (shape, dtype, hooks, `.grad`) fetch nothing.

PyTorch changes the type of a parameter in the same way (`UninitializedParameter.materialize`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import LifetimeError, UsageError
from infinity.units.compiled import eager, written
from infinity.units.residents import Owner, behind, owner_of, owners_of
from infinity.units.stored import inner

if TYPE_CHECKING:
    from infinity.units.unit import Unit

_GETTERS = (
    *("_base", "_version", "grad_dtype", "grad_fn", "is_leaf", "output_nr", "requires_grad", "retains_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("device", "is_cpu", "is_cuda", "is_meta", "is_xpu"),
    *("dtype", "is_quantized", "is_sparse", "itemsize", "layout", "nbytes"),
    *("name", "names", "ndim", "shape"),
)
_SETTERS = ("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad")
_METHODS = (
    *("_is_view", "backward", "requires_grad_", "retain_grad"),
    *("register_hook", "register_post_accumulate_grad_hook"),
    *("element_size", "get_device", "is_complex", "is_floating_point", "is_signed"),
    *("__len__", "dim", "ndimension", "nelement", "numel", "size"),
)


def _metadata() -> Iterator[Any]:
    for name in _GETTERS:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__
    for name in _SETTERS:
        yield getattr(torch.Tensor, name).__set__
    yield from (getattr(torch.Tensor, name) for name in _METHODS)
    yield from (torch.is_floating_point, torch.is_complex, torch.numel)


METADATA = frozenset(_metadata())
_grad: Any = torch.Tensor.grad
_GRAD = (_grad.__get__, _grad.__set__, _grad.__delete__)
_data: Any = torch.Tensor.data
_SET_DATA = _data.__set__
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad)
"""Functions that take parameters as inputs of a derivative and do not read their values."""
_NEW_PARAMETER = nn.Parameter.__new__.__code__


class Released:
    """Mixin of the types that `release` gives to parameters."""

    __slots__ = ()
    _kind: type
    """The type that the parameter has while its unit is resident."""

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Shapes and dtypes are those of the placeholder, and a fetch for them would cost a read [Note: parameters
        # outside of their forward].
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _GRAD:
            _check_grad(args[0], *(args[1:] if func is not _GRAD[0] else ()))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # A parameter is an input of the derivative here, and its values are not read.
        if func in _BACKWARDS:
            return _backward(func, args, kwargs)
        # Only a backward has gradients of one rank alone, from which code could edit shared parameters.
        if torch._C._current_graph_task_id() != -1:
            _check_edit(func, args, kwargs)
        if func == _SET_DATA:  # `==`, since each access creates a new wrapper
            _check_data(*args)
        # Held and not just used: the fetch of a second argument must not evict the first one.
        with _whole(_owners((args, kwargs))):
            return func(*args, **kwargs)

    def detach(self) -> torch.Tensor:
        # nn.Parameter(...) would share the buffer, whose memory belongs to another unit soon.
        if sys._getframe(1).f_code is _NEW_PARAMETER:
            (unit, _, slot), *_ = _owners_of(self)
            raise UsageError(
                f"nn.Parameter(…) was made from {unit.layout.slots[slot].name}, which an engine has: pass "
                ".detach().clone() of it, or .detach() to share its memory."
            )
        return torch.Tensor.detach(self)  # type: ignore[arg-type]

    @eager
    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.set_`, for which PyTorch does not call `__torch_function__`."""
        set_: Any = torch.Tensor.set_
        if torch._C._current_graph_task_id() != -1:
            _check_edit(set_, (self,), {})
        with _whole(_owners((self, args, kwargs))):
            return set_(self, *args, **kwargs)

    @eager
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _whole(_owners_of(self)):
            return copy.deepcopy(self, memo)


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return `parameter.grad` and set it to None."""
    # The released type may refuse: it cannot tell the engine from the user's code (`_check_grad`).
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    return gradient


def _check_grad(parameter: Any, *value: Any) -> None:
    """Raise UsageError if the user's code reads or sets a `.grad` that the engine has taken.

    Otherwise manual clipping would see None and silently skip the parameter. value: the value to set; absent for a
    read.
    """
    owner = owner_of(parameter)
    if owner is None:
        return
    name = owner.unit.layout.slots[owner.slot].name
    # Two texts, since the fix differs: inside a backward a hook came too late, after it the gradient is gone.
    if owner.slot in owner.unit.collected and torch._C._current_graph_task_id() != -1:
        raise UsageError(
            f"{name}.grad was {'set' if value else 'read'} in a backward, after the engine took a gradient of this "
            "step. A hook sees the gradient of the present backward only, and only if it was registered before "
            "infinity.initialize(). To read or change sums over micro-batches and ranks, set infinity.update to "
            '"next_forward" and call infinity.get_full_grad() or infinity.set_full_grad() before engine.step().'
        )
    if owner.slot in owner.unit.collected:
        raise UsageError(
            f"{name}.grad was {'set' if value else 'read'} between backward and engine.step(), and the engine has "
            'taken the gradient. To update, call engine.step(). To clip, set "gradient_clipping". To read, change or '
            'drop gradients, set infinity.update to "next_forward" and call infinity.get_full_grad(), '
            "infinity.set_full_grad() or engine.drop_gradients()."
        )
    if value and value[0] is not None and torch._C._current_graph_task_id() == -1 and owner.unit.layout.trainable:
        raise UsageError(
            f"{name}.grad was set by hand: the engine updates with gradients that a backward leaves. Call backward, "
            "and then infinity.set_full_grad(), before engine.step()."
        )


def _check_edit(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if `func`, called in a backward, writes a parameter that several ranks share."""
    for unit, fetcher, slot in _owners(written(func, args, kwargs)):
        fetcher.check_edit_in_backward(unit.layout.slots[slot].name)


def _check_data(parameter: Any, data: Any) -> None:
    """Raise LifetimeError if `data`, to be assigned to `parameter.data`, has another shape, and UsageError if it is the
    memory of another unit's parameters.
    """
    owner = owner_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        shape, given = parameter.shape, getattr(data, "shape", None)
    if owner is not None and given is not None and given != shape:
        raise wrong_shape(owner.unit.layout.slots[owner.slot].name, given, shape)
    if owner is not None and isinstance(data, torch.Tensor):
        refuse_shared(owner.unit, owner.slot, data)


def refuse_shared(unit: Unit, slot: int, data: torch.Tensor) -> None:
    """Raise UsageError if `data`, assigned to `.data` of a parameter of `unit`, is the memory of another unit."""
    found = behind(data)
    if found is not None and found[0] is not unit:
        raise UsageError(
            f"{unit.layout.slots[slot].name}.data was assigned memory of unit {found[0].name}. In a plain loop both "
            "parameters would share it from then on, which an engine cannot follow: the data was dropped. Assign a "
            "copy (.clone()); or use one Parameter in both places before infinity.initialize()."
        )


def wrong_shape(name: str, given: torch.Size, shape: torch.Size) -> LifetimeError:
    """Return the error for data of shape `given` assigned to a managed parameter of shape `shape`."""
    return LifetimeError(
        f"{name} was given data of shape {list(given)} while an engine has the model, where its shape is "
        f"{list(shape)}: the data was dropped. Close the engine with engine.close(restore=True), which returns the "
        "values to the model, change the model and make a new engine."
    )


def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with graph edges in place of parameters, so that Python dispatch stays enabled: the backward may run
    the model's code (recomputation, hooks), in which each parameter must fetch its unit.
    """
    tensors = (args, kwargs.get("inputs"))
    parameters: list[Any] = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Released)]
    if not all(parameter.requires_grad for parameter in parameters):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)  # raises torch's error
    wanted = args[1] if len(args) > 1 else ()
    args, inputs = tree_map_only(Released, _edge, tensors)
    kwargs = kwargs if inputs is None else {**kwargs, "inputs": inputs}
    # Edges have no shape, so zeros for unused inputs are made here, from the parameters.
    if not kwargs.get("materialize_grads"):
        return func(*args, **kwargs)
    found = func(*args, **{**kwargs, "materialize_grads": False, "allow_unused": True})
    return tuple(
        torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g
        for p, g in zip(wanted, found, strict=True)
    )


def _edge(parameter: torch.Tensor) -> GradientEdge:
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter)


@contextmanager
def _whole(owners: Iterable[Owner]) -> Iterator[None]:
    """Hold the units of these owners in the block, so that their parameters have their values and own types."""
    with ExitStack() as undo:
        for unit, fetcher, _ in owners:
            # The scope comes first: a fetch binds the parameter with the type of an open scope.
            undo.callback(fetcher.scope.leave, fetcher.scope.enter())
            fetcher.hold(unit)
            undo.callback(fetcher.unhold, unit)
            fetcher.await_committed_write(unit)
        yield


def _owners(values: Any) -> Iterator[Owner]:
    """Yield the owners of all managed parameters in the arguments of an operation. Resident ones are included, since
    fetching one unit must not evict another.
    """
    for value in leaves(values):
        # A closed engine has no owner for a released parameter, which is an error and not a plain tensor.
        if isinstance(value, Released):
            yield from _owners_of(value)
        elif isinstance(value, torch.Tensor):
            yield from owners_of(value)


def leaves(values: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dicts: the arguments of an operation."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, dict):
        yield from leaves(list(values.values()))
    else:
        yield values


def _owners_of(parameter: Any) -> list[Owner]:
    owners = owners_of(parameter)
    if not owners:
        with torch._C.DisableTorchFunctionSubclass():
            shape = list(parameter.shape)
        raise UsageError(
            f"a parameter of shape {shape} was used, whose engine is closed or belongs to another process: its values "
            "are gone from memory. Close with engine.close(restore=True) to keep them, or load a checkpoint into a new "
            "engine."
        )
    return owners


def version_of(parameter: nn.Parameter) -> int:
    """Return PyTorch's count of in-place edits of `parameter`, without fetching its unit."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


@cache
def derived_type(base: type, kind: type) -> type:
    """Return the class of both `base`, which intercepts uses, and `kind`, the own class of a parameter."""
    # Without slots of its own, the class has the memory layout that an assignment to `__class__` requires.
    body = {"__slots__": (), "_kind": kind, "__module__": base.__module__}
    return type(kind)(f"{base.__name__}{kind.__name__}", (base, kind), body)


def is_released(parameter: object) -> bool:
    """True if `parameter` has the type that fetches its unit, as every parameter without values does."""
    return isinstance(parameter, Released)


def own_type(parameter: torch.Tensor) -> type:
    """Return the type that `parameter` has while its unit is resident in a forward."""
    kind = type(parameter)
    return kind._kind if issubclass(kind, Released) else kind


def release(unit: Unit) -> None:
    """Change the types of a unit's parameters so that every use of their values fetches the unit first."""
    for parameter in chain(unit.parameters, unit.wrappers):
        kind = type(parameter)
        if not issubclass(kind, Released):
            parameter.__class__ = derived_type(Released, kind)


def restore(unit: Unit) -> None:
    """Undo `release`: give a unit's parameters their own types. The caller keeps their values resident.

    A wrapper gets its own type once all of its inner tensors have theirs, which may be in other units.
    """
    restore_types(unit.parameters)
    restore_types(each for each in unit.wrappers if not any(is_released(tensor) for _, tensor in inner(each)))


def restore_types(parameters: Iterable[nn.Parameter]) -> None:
    """Give these parameters their own types."""
    for parameter in parameters:
        kind = type(parameter)
        if issubclass(kind, Released):
            parameter.__class__ = kind._kind
