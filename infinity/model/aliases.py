"""Finds tensors that share memory with a parameter and would stop following it.

An engine moves a parameter's values from their memory to a tier. Another tensor over that memory would keep the initial
values, while it follows the training in a plain loop. Sharing the Parameter object (`b.weight = a.weight`) works.

Three kinds are refused: a parameter that overlaps another parameter or a buffer; any other overlapping tensor that the
model refers to; for trained parameters, any other overlapping tensor in the process. Two kinds are allowed: tensors
outside the model over frozen parameters, whose values do not change; tensors that only autograd graphs refer to, since
a graph needs the values from when it was recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from infinity.comm.dtensor import has_storage, local
from infinity.errors import ModelError
from infinity.model.added import describe_holder, find_paths, refresh_locals
from infinity.model.hooks import UnitParameters
from infinity.model.remote import is_remote
from infinity.tiers.memory import storage_users
from infinity.units.released import is_released
from infinity.units.stored import named_stored

_NAMED = 3
"""Largest number of problems listed in one error."""


class _Held(NamedTuple):
    """A parameter or a buffer of the model, and the bytes that it spans."""

    order: int
    """Position in the model; problems are reported in this order."""
    name: str
    tensor: torch.Tensor
    values: torch.Tensor
    """The local part of `tensor`: all of it, unless it is a DTensor."""
    space: tuple[str, int]
    """Two spans overlap only within one space: the memory of a device, or a storage on the meta device."""
    start: int
    stop: int
    is_parameter: bool
    """False for a buffer."""


class _Alias(NamedTuple):
    """A tensor that is no parameter or buffer of the model, and a parameter that it overlaps."""

    tensor: torch.Tensor
    parameter: _Held


def check_aliases(model: nn.Module) -> None:
    """Raise ModelError that names the tensors sharing memory with a parameter of `model`. Changes nothing."""
    if any(isinstance(module._parameters, UnitParameters) for module in model.modules()):
        return  # the model has an engine: `check_values` raises
    held = list(_held(model))
    _check_overlaps(held)
    shared = _with_other_users(held)
    # Twice: a frame may list variables that were deleted, and a false alarm is worse than a second search.
    if shared and _aliased(model, shared):
        refresh_locals()
        problem = _aliased(model, shared)
        if problem:
            raise ModelError(problem)


def _held(model: nn.Module) -> Iterator[_Held]:
    """Yield parameters and buffers that have memory: each Parameter once, each buffer once."""
    parameters = ((each.name, each.tensor, True) for each in named_stored(model))
    buffers = ((name, buffer, False) for name, buffer in model.named_buffers())
    for order, (name, tensor, is_parameter) in enumerate(chain(parameters, buffers)):
        if is_released(tensor) or is_remote(tensor):
            continue  # its engine was closed: `check_values` raises; or its values are on rank 0, which checks them
        values = local(tensor)
        if is_lazy(tensor) or not has_storage(values) or not values.numel():
            continue
        space = str(values.device), values.untyped_storage()._cdata if values.is_meta else 0
        yield _Held(order, name, tensor, values, space, *_span(values), is_parameter)


def _span(values: torch.Tensor) -> tuple[int, int]:
    first = int(values.storage_offset()) * values.itemsize if values.is_meta else values.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return first, first + (last + 1) * values.itemsize


# -- parameters and buffers --------------------------------------------------------------------------------------------


def _check_overlaps(held: Sequence[_Held]) -> None:
    """Raise ModelError if two parameters, or a parameter and a buffer, have an element in common, or if two elements
    of a trained parameter have the same address.
    """
    problems = [
        f"elements of parameter {each.name} share memory (its strides are {tuple(each.values.stride())}), and would be "
        f"trained apart: give each memory of its own ({each.name}.data = {each.name}.data.contiguous())"
        for each in held
        if each.is_parameter and each.tensor.requires_grad and _overlaps_itself(each.values)
    ]
    problems += [
        _overlap_problem(one, other) for one, other in _overlapping(held) if one.is_parameter or other.is_parameter
    ]
    if problems:
        raise ModelError(_listed(problems))


def _overlaps_itself(values: torch.Tensor) -> bool:
    """Return whether two elements have the same address."""
    dimensions = sorted((stride, size) for stride, size in zip(values.stride(), values.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dimensions:
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    addresses = torch.zeros(1, dtype=torch.int64)
    for stride, size in dimensions:
        addresses = (addresses[:, None] + stride * torch.arange(size)).flatten()
    return len(addresses.unique()) < len(addresses)


def _overlapping(held: Sequence[_Held]) -> Iterator[tuple[_Held, _Held]]:
    """Yield pairs with an element in common, each pair in the order of the model."""
    reaching: list[_Held] = []
    for each in sorted(held, key=lambda each: (each.space, each.start)):
        reaching = [before for before in reaching if before.space == each.space and before.stop > each.start]
        for before in reaching:
            if _have_common_elements(before.values, each.values):
                yield (before, each) if before.order < each.order else (each, before)
        reaching.append(each)


def _have_common_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors with overlapping spans share an element; two columns of one matrix do not."""
    if one.is_contiguous() and other.is_contiguous():
        return True  # contiguous: every byte of a span belongs to an element
    return bool(np.shares_memory(_as_array(one), _as_array(other)))


def _as_array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array with the elements' positions, which NumPy can compare. No element is read."""
    layout = {
        "version": 3,
        "typestr": f"|V{values.itemsize}",
        "shape": tuple(values.shape),
        "strides": tuple(stride * values.itemsize for stride in values.stride()),
        # Offset: NumPy needs an address other than 0, where tensors on the meta device begin.
        "data": (_span(values)[0] + (1 << 20), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=layout))


def _overlap_problem(one: _Held, other: _Held) -> str:
    if one.is_parameter and other.is_parameter and one.tensor is not other.tensor:
        return (
            f"parameters {one.name} and {other.name} share memory but are two Parameters, which would be trained "
            f"apart: share the Parameter itself ({other.name} = {one.name}), or give each memory of its own "
            f"({other.name}.data = {other.name}.data.clone())"
        )
    parameter, buffer = (one, other) if one.is_parameter else (other, one)
    return (
        f"buffer {buffer.name} shares the memory of parameter {parameter.name}, and would not follow its values: "
        "register a copy (.detach().clone()), or read the parameter itself where the buffer is used"
    )


# -- other tensors -----------------------------------------------------------------------------------------------------


def _with_other_users(held: Sequence[_Held]) -> dict[int, list[_Held]]:
    """Return storage → the model's parameters in it, for storages with users other than the model's own tensors."""
    # Counted on a fresh tensor, since a storage has references of PyTorch's own.
    unshared = storage_users(torch.empty(1, device="cpu"))
    by_storage: dict[int, list[_Held]] = {}
    for each in held:
        by_storage.setdefault(each.values.untyped_storage()._cdata, []).append(each)
    found: dict[int, list[_Held]] = {}
    for storage, members in by_storage.items():
        parameters = [each for each in members if each.is_parameter]
        known = len({id(each.values) for each in members})
        if parameters and storage_users(parameters[0].values) > unshared + known - 1:
            found[storage] = parameters
    return found


def _aliased(model: nn.Module, shared: dict[int, list[_Held]]) -> str:
    """Return the error text for foreign tensors that share memory with parameters; empty if there are none.

    A separate function, since a raised error keeps the frames that it passes, which would keep the tensors alive.
    """
    gc.collect()  # tensors in unreachable cycles do not count
    own = (*(each.tensor for each in named_stored(model)), *model.buffers(), *_recomputed(model))
    known = {id(each) for tensor in own for each in (tensor, local(tensor))}
    aliases = sorted(_others(shared, known), key=lambda alias: alias.parameter.order)
    targets = {id(alias.tensor): alias for alias in aliases}
    if not targets:
        return ""
    paths = find_paths(_roots(model), targets)
    problems = [
        f"{paths[key]} shares the memory of parameter {alias.parameter.name}, and would keep its initial values: "
        "compute it in forward from the parameter itself, register a tied weight as the same Parameter, or keep a copy "
        "(.detach().clone())"
        for key, alias in targets.items()
        if key in paths
    ]
    if not problems:
        problems = [
            _outside_problem(alias)
            for alias in targets.values()
            if alias.parameter.tensor.requires_grad and not alias.parameter.values.is_meta
        ]
    return _listed(problems)


def _recomputed(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield attributes that view a parameter until the first forward, and are recomputed before each forward."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield getattr(module, hook.name)


def _others(shared: dict[int, list[_Held]], known: set[int]) -> Iterator[_Alias]:
    """Yield tensors tracked by the garbage collector that overlap a parameter in `shared`, except ids in `known`."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]:
            if id(tensor) in known:
                continue
            try:
                if is_lazy(tensor) or not has_storage(tensor) or not tensor.numel():
                    continue
                storage = tensor.untyped_storage()._cdata
                start, stop = _span(tensor)
            except RuntimeError:  # a tensor type without storage or strides
                continue
            for each in shared.get(storage, ()):
                if start < each.stop and each.start < stop and _have_common_elements(tensor, each.values):
                    yield _Alias(tensor, each)
                    break


def _roots(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (path, value) for every attribute of the model's modules and parameters."""
    for name, module in model.named_modules(prefix="model"):
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                yield f"{name}.{attribute}", value
    for name, parameter in model.named_parameters(prefix="model"):
        for attribute, value in vars(parameter).items():
            yield f"{name}.{attribute}", value


def _outside_problem(alias: _Alias) -> str:
    holder = describe_holder(alias.tensor, besides=alias)
    return (
        f"a tensor of shape {list(alias.tensor.shape)} outside of the model ({holder}) shares the memory of parameter "
        f"{alias.parameter.name}. It would keep the initial values instead of following the training: "
        "delete it (del) before infinity.initialize, or keep a copy (.detach().clone())"
    )


def _listed(problems: Iterable[str]) -> str:
    found = list(problems)
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return "\n".join([*found[:_NAMED], *more])
