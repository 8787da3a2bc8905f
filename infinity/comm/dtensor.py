"""Local values of a parameter: all of it, or this rank's part of a `DTensor` under tensor parallelism.

Units keep only local values. Sharding over data-parallel ranks applies on top of that, and the model's own collectives
(`torch.distributed.tensor.parallel`) run unchanged.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if `tensor` is a torch.Tensor or an nn.Parameter, not a subclass, which may carry more than its memory."""
    return type(tensor) in _PLAIN


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor."""
    # Before the look-up of the library, since almost all tensors end here.
    if type(tensor) in _PLAIN:
        return False
    library = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of `tensor`, in the same memory."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def set_local(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace this rank's values of `parameter` by `values`, without a copy. `parameter` stays the same object."""
    if is_distributed(parameter):
        # `.data` of a DTensor would be a DTensor: only its local tensor can be replaced.
        parameter._local_tensor = values.data  # type: ignore[attr-defined]
    else:
        parameter.data = values


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `gradient`, sharded like `parameter`. Reduces a pending (partial) sum over ranks."""
    if not is_distributed(gradient):
        return gradient
    divided: Any = gradient
    if divided.placements != parameter.placements:  # type: ignore[attr-defined]
        divided = divided.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    values: torch.Tensor = divided.to_local()
    return values


def spec_of(tensor: torch.Tensor) -> Any:
    """Return the DTensor spec of `tensor` (mesh and placements); None if it is no DTensor."""
    return tensor._spec if is_distributed(tensor) else None  # type: ignore[attr-defined]


def of_spec(values: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of `spec` whose local part is `values`; `values` itself if spec is None."""
    if spec is None:
        return values
    whole: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor(values, spec, requires_grad=False)
    return whole


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside wrappers of torch.func, whose type is torch.Tensor too; other tensors unchanged."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is strided and has memory of its own, not a wrapper around other tensors."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return False
    return type(tensor) in _PLAIN or not (
        is_traceable_wrapper_subclass(tensor) or isinstance(tensor, torch._subclasses.FakeTensor)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is strided, not quantised and not nested, and has memory of its own, or is meta."""
    if tensor.is_quantized or tensor.is_nested or not has_storage(tensor):
        return False
    return is_plain(tensor) or _has_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a subclass has memory. A wrapper (`Tensor._make_wrapper_subclass`) has none."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return tensor.is_meta
    return True
