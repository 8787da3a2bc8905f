"""Parameters whose values only rank 0 holds until an engine is constructed, which then broadcasts them.

The other ranks need no memory for such a model. There a parameter keeps its shape, dtype and device, and results of
operations on it have no values either. An operation that needs the values, or writes them, raises UsageError.

PyTorch changes the type of a parameter in the same way (`UninitializedParameter.materialize`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import UsageError
from infinity.units.released import METADATA, derived_type, leaves
from infinity.units.unit import placeholder

_tensor: Any = torch.Tensor
_SAME_VALUES = frozenset({_tensor.detach, _tensor.data.__get__})
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type")
)
_NO_VALUES = frozenset(
    {
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.grad.__delete__,
        torch._has_compatible_shallow_copy_type,
        *(getattr(torch, f"{kind}_like") for kind in ("empty", "full", "ones", "zeros")),
        *(getattr(torch.Tensor, f"new_{kind}") for kind in ("empty", "full", "ones", "tensor", "zeros")),
    }
)
"""Operations that use no value, besides METADATA."""
_REFUSED = re.compile(r"(?!__).*_$|__i\w+__$|__set(item)?__$|data_ptr|(un)?_?typed_storage|storage$")
"""Names of operations that write into a tensor or access its memory."""


class Remote:
    """Mixin of the types that `drop_values` gives to parameters."""

    __slots__ = ()
    _kind: type
    """The type that the parameter has with values."""
    _label: str
    _digest: bytes | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        remote: Any = next(value for value in leaves((args, kwargs)) if isinstance(value, Remote))
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA or func in _NO_VALUES:
                return func(*args, **kwargs)
            if func in _SAME_VALUES:
                return _as_remote(func(*args, **kwargs), remote._label, remote._digest)
            if func in _CONVERSIONS and args[0] is remote:
                return _converted(remote, func, args[1:], kwargs)
            if func == _tensor.data.__set__ and isinstance(args[1], Remote):
                _as_remote(remote, remote._label, args[1]._digest)
                return func(*args)
            if func in (torch.equal, torch.Tensor.equal) and all(isinstance(each, Remote) for each in args):
                return _equal(*args)
            return _unknown(remote, func, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.set_`, for which PyTorch does not call `__torch_function__`."""
        raise _refusal(self._label)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self._label)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        tensor: Any = self
        return f"Parameter(values on rank 0, shape={list(tensor.shape)}, dtype={tensor.dtype})"


def drop_values(parameter: nn.Parameter, label: str, digest: bytes | None = None) -> None:
    """Free the memory of `parameter`, whose values are rank 0's.

    label: names it in errors. digest: of its bytes, by which two such parameters are compared.
    """
    if not is_remote(parameter):
        parameter.data = placeholder(tuple(parameter.shape), parameter.dtype, parameter.device)
    _as_remote(parameter, label, digest)


def restore(parameter: nn.Parameter) -> None:
    """Undo `drop_values`: give `parameter` its own type and memory whose values the caller sets. Idempotent."""
    if isinstance(parameter, Remote):
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        plain(parameter)
        parameter.data = value


def plain(parameter: nn.Parameter) -> None:
    """Give `parameter` its own type. Its data stays a placeholder, which the caller replaces or never reads."""
    if isinstance(parameter, Remote):
        del parameter._label, parameter._digest
        parameter.__class__ = parameter._kind


def is_remote(parameter: object) -> bool:
    """True if the values of `parameter` are on rank 0 only."""
    return isinstance(parameter, Remote)


def _as_remote(tensor: Any, label: str, digest: bytes | None) -> Any:
    if not is_remote(tensor):
        kind: type = type(tensor)
        tensor.__class__ = derived_type(Remote, kind)
    tensor._label, tensor._digest = label, digest
    return tensor


def _converted(remote: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `remote` in another dtype. Raises UsageError for another device."""
    one = func(remote.as_strided((), ()), *args, **kwargs)
    if one.device != remote.device:
        raise UsageError(
            f"{remote._label} was moved to {one.device} before initialize(), and only rank 0 has its values: leave the "
            "move out, since initialize() moves the parameters to their device"
        )
    digest = remote._digest if one.dtype == remote.dtype else None
    return _as_remote(one.expand(remote.shape), remote._label, digest)


def _unknown(remote: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, without values. Raises UsageError if it needs them or writes into a tensor."""
    values = (args, kwargs)
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    if _REFUSED.match(func.__name__) or kwargs.get("out") is not None or not all(map(is_remote, tensors)):
        raise _refusal(remote._label)
    # The meta device gives shape and dtype of the result, and refuses to show values.
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), values)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal(remote._label) from error

    def without_values(like: torch.Tensor) -> Any:
        return _as_remote(placeholder(tuple(like.shape), like.dtype, remote.device).detach(), remote._label, None)

    return tree_map_only(torch.Tensor, without_values, result)


def _equal(first: Any, second: Any) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # Without both digests the values are on rank 0 only, and a guess could differ between ranks.
    if first._digest is None or second._digest is None:
        raise _refusal((second if first._digest else first)._label)
    return bool(first._digest == second._digest)


def _refusal(label: str) -> UsageError:
    return UsageError(
        f"the values of {label} were used before initialize(), and only rank 0 has them: use and copy them on all "
        "ranks in `with deepspeed.zero.GatheredParameters(parameters):`, or after initialize()"
    )
