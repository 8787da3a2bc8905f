"""Tensors that an engine stores for a parameter: the parameter itself, or the inner tensors of a wrapper.

A wrapper is a tensor subclass without memory of its own, such as torchao's `Int8Tensor`. It names its inner tensors
(`__tensor_flatten__`), which may be wrappers too. The wrapper stays the model's parameter; units hold the inner
tensors, so that a fetch fills the wrapper [Note: parameters of inner tensors].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.comm.dtensor import is_dense, is_distributed, is_plain
from infinity.units.compiled import own_name


class Stored(NamedTuple):
    """A tensor in a unit. name: as of the model's parameters, with the path in a wrapper. parameter: the model's."""

    name: str
    tensor: torch.Tensor
    parameter: nn.Parameter

    @property
    def keeps_dtype(self) -> bool:
        """True for codes and scales, whose dtype belongs to their format. False: an engine may convert the tensor."""
        return self.tensor is not self.parameter or bool(_statistics(self.parameter))


def of_codes(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with a frozen weight in fewer than 16 bits (float8), whose values and scales keep their dtypes.

    Converted, such a weight would be a plain one to its module, which then leaves out the scales.
    """
    for module in model.modules():
        own = (p for p in module._parameters.values() if p is not None and not p.requires_grad)
        if any(p.dtype.is_floating_point and p.dtype.itemsize < 2 for p in own):
            yield module


def beside_codes(model: nn.Module) -> set[int]:
    """Return the ids of the frozen parameters of `of_codes`."""
    own = (p for module in of_codes(model) for p in module.parameters(recurse=False))
    return {id(parameter) for parameter in own if not parameter.requires_grad}


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` consists of inner tensors that it names, and is not ragged (nested) or sparse.

    A `DTensor` has a path of its own.
    """
    if is_plain(tensor) or is_distributed(tensor) or not is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided


def inner(wrapper: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of the innermost tensors of `wrapper`."""
    for name in _flatten(wrapper)[0]:
        tensor = getattr(wrapper, name)
        if is_wrapper(tensor):
            yield from inner(tensor, f"{prefix}{name}.")
        else:
            yield prefix + name, tensor


def stored(parameter: nn.Parameter, name: str = "") -> list[Stored]:
    """Return the tensors that are stored for `parameter`, called `name` in the model.

    These are the parameter, or a wrapper's inner tensors; with a quantised weight of bitsandbytes, its scales too.
    """
    if is_wrapper(parameter):
        return [Stored(f"{name}.{path}", tensor, parameter) for path, tensor in inner(parameter)]
    scales = _statistics(parameter)
    return [
        Stored(name, parameter, parameter),
        *(Stored(f"{name}.{path}", tensor, parameter) for path, tensor in scales.items()),
    ]


def stored_in(layer: nn.Module) -> list[Stored]:
    """Return the tensors that are stored for a layer's own parameters."""
    return [each for name, parameter in layer.named_parameters(recurse=False) for each in stored(parameter, name)]


def _statistics(parameter: Any) -> dict[str, torch.Tensor]:
    """Return the scales of a quantised weight of bitsandbytes, attributes without which its codes have no meaning.

    Keys are the names of its state_dict, as far as that has them.
    """
    if is_plain(parameter):
        return {}
    found, state = {"SCB": getattr(parameter, "SCB", None)}, getattr(parameter, "quant_state", None)
    if state is not None:
        found["absmax"] = getattr(state, "absmax", None)
        if (nested := getattr(state, "state2", None)) is not None:
            found |= {"nested_absmax": nested.absmax, "nested_offset": state.offset}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor) and not value.is_meta}


def named_stored(model: nn.Module, prefix: str = "", **options: bool) -> Iterator[Stored]:
    """Yield the stored tensors of `model`. Options as of `nn.Module.named_parameters`."""
    for name, parameter in model.named_parameters(prefix, **options):
        yield from stored(parameter, name)


def problem_of(wrapper: nn.Parameter) -> str:
    """Return why the inner tensors of `wrapper` cannot be stored, with the fix; empty if they can."""
    if wrapper.requires_grad:
        return "requires a gradient, and only frozen ones are stored by their inner tensors: freeze it"
    try:
        found = list(inner(wrapper))
        again = list(inner(wrapper))
    except Exception as error:  # noqa: BLE001 - the subclass's own code
        return f"cannot be flattened ({error!r:.80})"
    if not found:
        return "names no inner tensors"
    for (path, tensor), (_, same) in zip(found, again, strict=True):
        if tensor is not same:
            return f"makes {path} anew at each access, so that no fetch could fill it"
        if not is_plain(tensor) or not is_dense(tensor):
            return f"holds {path}, a {type(tensor).__name__} that is not dense"
        if tensor.is_meta:
            return f"has {path} on the meta device: build the model on the cpu"
        if not tensor.is_contiguous():
            return f"holds {path} with strides {tuple(tensor.stride())}: quantise a contiguous tensor"
    return ""


@dataclass(frozen=True, slots=True)
class Shell:
    """A wrapper without its inner tensors. parts: name → inner wrapper; None for a tensor."""

    kind: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    parts: Mapping[str, Shell | None]

    @classmethod
    def of(cls, wrapper: torch.Tensor) -> Shell:
        names, context = _flatten(wrapper)
        parts = {name: getattr(wrapper, name) for name in names}
        # Without the type that fetches: strides are the wrapper's own, not those of a placeholder.
        with torch._C.DisableTorchFunctionSubclass():
            size, stride = wrapper.size(), wrapper.stride()
        shells = {name: cls.of(part) if is_wrapper(part) else None for name, part in parts.items()}
        kind = type(wrapper)  # or the type that fetches
        return cls(getattr(kind, "_kind", kind), context, size, stride, shells)

    def around(self, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> torch.Tensor:
        """Return the wrapper of these innermost tensors, by path."""
        parts = {
            name: tensors[prefix + name] if shell is None else shell.around(tensors, f"{prefix}{name}.")
            for name, shell in self.parts.items()
        }
        whole: torch.Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return whole


def follow_device(wrappers: Iterable[nn.Parameter]) -> None:
    """Give wrappers the device of their inner tensors, which have been moved, and keep the objects."""
    with torch._C.DisableTorchFunctionSubclass():
        for wrapper in wrappers:
            tensors = dict(inner(wrapper))
            if any(tensor.device != wrapper.device for tensor in tensors.values()):
                wrapper.data = Shell.of(wrapper).around(tensors)  # replaces what torch knows, and no attribute


class Wrappers:
    """The wrappers of a model, made anew of inner tensors that arrive in any order."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, tuple[nn.Parameter, str]] = {}
        """id(inner tensor) → its wrapper and its path there."""
        self._names: dict[int, list[str]] = {}
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if is_wrapper(parameter):
                self._names.setdefault(id(parameter), []).append(own_name(name))
                self._places |= {id(tensor): (parameter, path) for path, tensor in inner(parameter)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._places

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, wrapper) for each name of the wrapper that `value`, of the inner `tensor`, completes."""
        parameter, path = self._places[id(tensor)]
        values = self._values.setdefault(id(parameter), {})
        values[path] = value
        if len(values) == len(stored(parameter)):
            whole = Shell.of(parameter).around(self._values.pop(id(parameter)))
            yield from ((name, whole) for name in self._names[id(parameter)])


def _flatten(wrapper: Any) -> tuple[list[str], Any]:
    # It may ask for sizes and strides, for which the type of a released parameter would fetch.
    with torch._C.DisableTorchFunctionSubclass():
        names, context = wrapper.__tensor_flatten__()
    return names, context
