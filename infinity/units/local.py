"""What this rank holds of a parameter: all of it, or its part of a `DTensor` that tensor parallelism divides.

Units keep these local values and nothing else: sharding over data-parallel ranks goes on top, and the model's own
collectives (`torch.distributed.tensor.parallel`) go on as they are.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if `tensor` is a torch.Tensor or an nn.Parameter, not of a subclass that may carry more than its memory."""
    return type(tensor) in _PLAIN


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    library = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of `tensor`, in the same memory."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def set_local(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make `values` what `parameter` holds here; it stays the same object."""
    if is_distributed(parameter):
        parameter._local_tensor = values.data  # type: ignore[attr-defined]
    else:
        parameter.data = values


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of `gradient`, divided as `parameter` is; a sum over ranks that is due is carried out."""
    if not is_distributed(gradient):
        return gradient
    divided: Any = gradient
    if divided.placements != parameter.placements:  # type: ignore[attr-defined]
        divided = divided.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    values: torch.Tensor = divided.to_local()
    return values


def spec_of(tensor: torch.Tensor) -> Any:
    """How `tensor` is divided over which ranks; None if it is not."""
    return tensor._spec if is_distributed(tensor) else None  # type: ignore[attr-defined]


def of_spec(values: torch.Tensor, spec: Any) -> torch.Tensor:
    """The tensor of which this rank holds `values`."""
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
    """Whether `tensor` has memory of its own, and is no wrapper around others that have."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return False
    return type(tensor) in _PLAIN or not (
        is_traceable_wrapper_subclass(tensor) or isinstance(tensor, torch._subclasses.FakeTensor)
    )
